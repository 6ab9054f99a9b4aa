"""Simulators: derivatives of functions of vectors, graphs of models with the chain rule, and the UM-Bridge protocol."""
