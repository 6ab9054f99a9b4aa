"""Pipelines of transformers: one table of tasks, their inputs and options, and their results."""
