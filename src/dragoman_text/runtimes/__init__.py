"""Runtimes of language models."""
