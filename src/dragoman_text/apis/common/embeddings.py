"""Embeddings: the vectors of a response."""

from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput


def shorten_vectors(vectors: Any, size: int, *, normalizes: bool = True) -> Any:
    """Return the first `size` numbers of each vector, scaled to length 1. Raises InvalidInput if they are shorter."""
    if size > vectors.shape[1]:
        raise InvalidInput(f"`dimensions` must be <= {vectors.shape[1]}, what the model has; got {size}")
    first = np.ascontiguousarray(vectors[:, :size])
    return normalize_vectors(first) if normalizes else first


def normalize_vectors(vectors: Any) -> Any:
    """Return the vectors scaled to length 1."""
    scaled = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.ascontiguousarray(scaled, np.float32)
