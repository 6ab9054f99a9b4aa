"""A network of two layers in NumPy; README.md says how it was trained."""

from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

import dragoman


class Answer(NamedTuple):
    """Scores of the digits 0 to 9."""

    probabilities: Annotated[NDArray[np.float32], dragoman.Shape(-1, 10)]


with np.load(Path(__file__).parent / "weights.npz") as file:
    WEIGHTS = dict(file)


@dragoman.model
def digits(picture: Annotated[NDArray[np.float32], dragoman.Shape(-1, 1, 8, 8)]) -> Answer:
    """Recognise a handwritten digit in a picture of 8 x 8 pixels, in pure NumPy."""
    rows = picture.reshape(-1, 64)
    on_light_paper = rows.mean(axis=1, keepdims=True) > 0.5
    hidden = np.where(on_light_paper, 1 - rows, rows) @ WEIGHTS["weights0"] + WEIGHTS["bias0"]
    scores = np.maximum(hidden, 0) @ WEIGHTS["weights1"] + WEIGHTS["bias1"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return Answer(scores / scores.sum(axis=1, keepdims=True))
