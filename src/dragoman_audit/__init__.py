"""Audit log in a file: append-only JSON lines, each with the hash of the one before, and the command that checks it."""
