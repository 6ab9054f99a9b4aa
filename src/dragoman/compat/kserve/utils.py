"""Helpers of custom models: arrays of a payload, and the response for a result."""

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.compat.kserve.errors import InvalidInput
from dragoman.compat.kserve.infer_type import InferOutput, InferRequest, InferResponse
from dragoman.compat.kserve.numpy_codec import from_np_dtype
from dragoman.compat.kserve.tensor_data import plain_parameters

_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")


def generate_uuid() -> str:
    return str(uuid.uuid4())


def cpu_count() -> int:
    return len(os.sched_getaffinity(0))


def strtobool(val: str) -> bool:
    """Return whether a text means true. Raises ValueError."""
    if val.lower() not in _TRUE + _FALSE:
        raise ValueError(f"invalid truth value {val!r}")
    return val.lower() in _TRUE


def get_predict_input(payload: Any, columns: Sequence[str] | None = None) -> Any:
    """Return the rows of a payload: an array, a list of text, or a data frame.

    Rows that are objects, and requests of the content type `pd`, are data frames. Raises InvalidInput.
    """
    if isinstance(payload, InferRequest):
        if plain_parameters(payload.parameters).get("content_type") == "pd":
            return payload.as_dataframe()
        first = payload.inputs[0]
        array = first.as_numpy()
        return first.data if first.datatype == "BYTES" and array.size and isinstance(array.flat[0], str) else array
    if not isinstance(payload, Mapping):
        raise InvalidInput(f"unsupported payload type {type(payload)}")
    rows = payload["inputs"] if "inputs" in payload else payload["instances"]
    first_row = rows[0] if len(rows) else None
    if isinstance(first_row, dict) or (isinstance(first_row, list) and first_row and isinstance(first_row[0], dict)):
        import pandas as pd

        return pd.concat([pd.DataFrame(row, columns=columns) for row in rows], axis=0)
    return rows if isinstance(first_row, str) else np.array(rows)


def get_predict_response(payload: Any, result: Any, model_name: str) -> Any:
    """Return the response in the form of the payload for an array, a list or a data frame. Raises InvalidInput."""
    is_frame = hasattr(result, "columns")
    if isinstance(payload, Mapping):
        if is_frame:
            return {"predictions": [row.to_dict() for _, row in result.iterrows()]}
        return {"predictions": result.tolist() if isinstance(result, np.ndarray) else result}
    if not isinstance(payload, InferRequest):
        raise InvalidInput(f"unsupported payload type {type(payload)}")
    arrays = {name: result[name].to_numpy() for name in result.columns} if is_frame else {"output-0": _array(result)}
    outputs = []
    for name, array in arrays.items():
        output = InferOutput(str(name), list(array.shape), from_np_dtype(array.dtype) or "")
        output.set_data_from_numpy(array, binary_data=payload.use_binary_outputs)
        outputs.append(output)
    return InferResponse(
        payload.id or generate_uuid(),
        model_name,
        outputs,
        use_binary_outputs=payload.use_binary_outputs,
        requested_outputs=payload.request_outputs,
    )


def _array(result: Any) -> Any:
    is_text = isinstance(result, list) and result and isinstance(result[0], str)
    return np.array(result, dtype=np.object_) if is_text else np.asarray(result)
