"""Derivatives of functions of vectors: the author's own, or what follows from the function."""
