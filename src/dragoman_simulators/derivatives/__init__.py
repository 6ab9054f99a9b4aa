"""Derivatives of functions of vectors: written by the user, or computed by a method of differentiation."""
