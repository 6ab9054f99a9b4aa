"""Custom models that both servers run."""

# ruff: noqa: UP006, UP035, UP045 - MLServer has no codecs for `list[str]`
# mypy: ignore-errors

import datetime
import json
from typing import List, Optional

import numpy as np
import pandas as pd
from mlserver import MLModel
from mlserver.codecs import (
    Base64Codec,
    DatetimeCodec,
    NumpyCodec,
    NumpyRequestCodec,
    PandasCodec,
    StringCodec,
    StringRequestCodec,
    decode_args,
)
from mlserver.errors import InferenceError
from mlserver.types import InferenceResponse, Parameters, RequestOutput, ResponseOutput


def _describe(value):
    """Return the type of a decoded value and its elements as text."""
    if isinstance(value, np.ndarray):
        return f"ndarray {value.dtype.kind} {list(value.shape)} {value.tolist()}"
    if isinstance(value, pd.DataFrame):
        return f"DataFrame {list(value.columns)} {value.to_numpy().tolist()}"
    if isinstance(value, list):
        names = sorted({"str" if isinstance(each, str) else type(each).__name__ for each in value})
        return f"list of {', '.join(names)}: {[each if not isinstance(each, str) else str(each) for each in value]}"
    if hasattr(value, "root"):
        return f"TensorData {_describe(list(value.root))}"
    return type(value).__name__


class Describe(MLModel):
    """Describe each input as `decode` returns it, and the request as `decode_request` does."""

    async def predict(self, payload):
        texts = [f"{each.name}: {_describe(self.decode(each))}" for each in payload.inputs]
        texts.append(f"request: {_describe(self.decode_request(payload))}")
        outputs = [StringCodec.encode_output("description", texts)]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)


class Double(MLModel):
    async def predict(self, payload):
        arrays = [self.decode(each, default_codec=NumpyCodec) for each in payload.inputs]
        outputs = [
            self.encode(2 * array, RequestOutput(name=each.name), default_codec=NumpyCodec)
            for each, array in zip(payload.inputs, arrays, strict=True)
        ]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)


class Plain(MLModel):
    """Return the data as it came."""

    async def predict(self, payload):
        outputs = [
            ResponseOutput(name=each.name, shape=each.shape, datatype=each.datatype, data=each.data)
            for each in payload.inputs
        ]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)


class Upper(MLModel):
    @decode_args
    async def predict(self, words: List[str], suffix: Optional[List[str]] = None) -> List[str]:
        return [word.upper() + (suffix[0] if suffix else "") for word in words]


class Norm(MLModel):
    @decode_args
    async def predict(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.sqrt(x**2 + y**2)


class Frame(MLModel):
    """Answer a data frame with a data frame."""

    async def predict(self, payload):
        frame = self.decode_request(payload, default_codec=PandasCodec)
        frame["rows"] = len(frame)
        return self.encode_response(frame, default_codec=PandasCodec)


class FrameOfLists(MLModel):
    async def predict(self, payload):
        count = payload.inputs[0].shape[0]
        frame = pd.DataFrame({"id": list(range(count)), "items": [[1, {"a": None}] for _ in range(count)]})
        return PandasCodec.encode_response(self.name, frame, self.version)


class Kinds(MLModel):
    """Return one output of each codec."""

    async def predict(self, payload):
        day = datetime.datetime(2024, 2, 29, 12, 30)
        outputs = [
            NumpyCodec.encode_output("floats", np.array([[1.5, np.nan], [3, 4]])),
            NumpyCodec.encode_output("flags", np.array([True, False])),
            NumpyCodec.encode_output("scalar", np.array(7)),
            NumpyCodec.encode_output("words", np.array(["ab", "c"])),
            StringCodec.encode_output("texts", ["ä", "b"]),
            Base64Codec.encode_output("bytes", [b"\x00\xff"]),
            DatetimeCodec.encode_output("days", [day]),
        ]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)


class Request(MLModel):
    """Return what the code sees of a request but its inputs."""

    async def predict(self, payload):
        given = payload.parameters
        seen = {
            "parameters": {k: v for k, v in given.model_dump().items() if k not in ("headers",)},
            "outputs": [each.name for each in payload.outputs or []],
            "header": given.headers.get("x-parity") if given.headers else None,
        }
        return StringRequestCodec.encode_response(self.name, [json.dumps(seen, sort_keys=True)], self.version)


class Whole(MLModel):
    async def predict(self, payload):
        array = self.decode_request(payload, default_codec=NumpyRequestCodec)
        return self.encode_response(array + 1, default_codec=NumpyRequestCodec)


class Marked(MLModel):
    """Set parameters of the response and of an output."""

    async def predict(self, payload):
        output = NumpyCodec.encode_output("y", np.arange(3, dtype=np.int32))
        output.parameters = Parameters(content_type="np", unit="m")
        return InferenceResponse(
            model_name=self.name, outputs=[output], parameters=Parameters(took=3, label="a", exact=True)
        )


class Failing(MLModel):
    async def predict(self, payload):
        kind = self.decode(payload.inputs[0], default_codec=StringCodec)[0]
        if kind == "inference":
            raise InferenceError("no such thing")
        raise ValueError(kind)


class ByName(MLModel):
    """Answer only outputs that are requested, with the codec of the request."""

    async def predict(self, payload):
        wanted = payload.outputs or [RequestOutput(name="texts")]
        outputs = [self.encode(["x", "y"], each, default_codec=StringCodec) for each in wanted]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)


class JsonHelloWorld(MLModel):
    """Answer a JSON object in one BYTES element, with a shape that counts characters."""

    async def predict(self, payload):
        given = {
            each.name: json.loads("".join(map(str, self.decode(each, default_codec=StringCodec))))
            for each in payload.inputs
        }
        text = json.dumps({"request": given}, sort_keys=True)
        output = ResponseOutput(
            name="json", shape=[len(text)], datatype="BYTES", data=[text], parameters=Parameters(content_type="str")
        )
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])


class Stream(MLModel):
    async def predict(self, payload):
        words = StringCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("text", words)])

    async def predict_stream(self, payloads):
        async for payload in payloads:
            for word in StringCodec.decode_input(payload.inputs[0])[0].split():
                yield InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("text", [word])])
