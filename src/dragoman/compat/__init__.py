"""Compatibility with MLServer and LMI: read their configuration files, and run custom models of MLServer."""
