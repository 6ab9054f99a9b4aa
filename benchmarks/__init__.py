"""Measurements of Dragoman on the machine at hand."""
