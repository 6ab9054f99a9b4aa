"""Internals of the stand-in."""
