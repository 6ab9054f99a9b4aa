"""Bytes in and out, for any protocol's table."""
