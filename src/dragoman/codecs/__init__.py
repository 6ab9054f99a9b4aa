"""Tensors to Python values and back, one file a content type."""
