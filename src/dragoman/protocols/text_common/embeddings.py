"""Embeddings: the vectors of a response."""

from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput


def shorten_vectors(vectors: Any, size: int) -> Any:
    """Return the first `size` numbers of each vector, scaled to length 1. Raises InvalidInput if shorter."""
    if size > vectors.shape[1]:
        raise InvalidInput(f"`dimensions` must be <= {vectors.shape[1]}, what the model has; got {size}")
    return normalize_vectors(vectors[:, :size])


def normalize_vectors(vectors: Any) -> Any:
    """Return the vectors scaled to length 1."""
    scaled = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.ascontiguousarray(scaled, np.float32)
