"""Results of pipelines: as JSON, with images as `data:` URLs and arrays by value, and as tensors."""

import io
import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import ModelFailed, NotSupported

# The modes of images that PNG stores; others are stored as TIFF.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


def to_json(value: Any) -> str:
    """Return a result as JSON. Raises ModelFailed for a value that JSON has no form for."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Return an array or a tensor as lists, a set as a list, and an image as the `data:` URL of a file."""
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy, tensors of PyTorch
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if callable(getattr(value, "save", None)) and hasattr(value, "mode"):
        return image_url(value)
    raise ModelFailed(f"the model returns a value of the type {type(value).__name__}, which has no form in JSON")


def image_url(image: Any) -> str:
    """Return an image of Pillow as a `data:` URL: a PNG, or a TIFF if PNG cannot store its pixels."""
    form = "PNG" if image.mode in _PNG_MODES else "TIFF"
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{b64encode(file.getvalue()).decode()}"


def pad(arrays: list[Array]) -> tuple[Array, Array]:
    """Return arrays of different lengths, [length, ...] each, as one padded with zeros, and their lengths."""
    lengths = np.array([len(each) for each in arrays], np.int64)
    rest = arrays[0].shape[1:] if arrays else ()
    padded = np.zeros((len(arrays), int(lengths.max(initial=0)), *rest), np.float32)
    for i, each in enumerate(arrays):
        padded[i, : len(each)] = each
    return padded, lengths


def _of_texts(results: list[Any]) -> dict[str, Array]:
    """The states of tokens, [rows, tokens, size], and the mask of those that are not padding."""
    states = [_numpy(each)[0] for each in results]
    features, lengths = pad(states) if states else (np.zeros((0, 0, 0), np.float32), np.zeros(0, np.int64))
    mask = (np.arange(features.shape[1]) < lengths[:, None]).astype(np.int64)
    return {"features": features, "attention_mask": mask}


def _of_images(results: list[Any]) -> dict[str, Array]:
    return {"features": np.concatenate([_numpy(each) for each in results]) if results else np.zeros((0, 0), np.float32)}


def _of_depths(results: list[Any]) -> dict[str, Array]:
    depths = [_numpy(each["predicted_depth"]) for each in results]
    if len({each.shape for each in depths}) > 1:
        raise NotSupported("output 'predicted_depth': expected images of one size in a request")
    return {"predicted_depth": np.stack(depths) if depths else np.zeros((0, 0, 0), np.float32)}


def _of_sounds(results: list[Any]) -> dict[str, Array]:
    audio, lengths = pad([_numpy(each["audio"]).reshape(-1) for each in results])
    rates = np.array([each["sampling_rate"] for each in results], np.int64)
    return {"audio": audio, "lengths": lengths, "sampling_rate": rates}


def _numpy(value: Any) -> Array:
    array: Array = value.float().cpu().numpy() if hasattr(value, "cpu") else np.asarray(value, np.float32)
    return array


# How the results of a task become tensors.
ARRAYS = {
    "feature-extraction": _of_texts,
    "image-feature-extraction": _of_images,
    "depth-estimation": _of_depths,
    "text-to-audio": _of_sounds,
}
