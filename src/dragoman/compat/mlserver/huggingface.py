"""MLServer's runtime for pipelines of transformers, for the tasks that Dragoman's own runtime does not have."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.compat.mlserver.codecs.base import InputCodec, register_input_codec
from dragoman.compat.mlserver.codecs.utils import decode_request_input
from dragoman.compat.mlserver.errors import InferenceError
from dragoman.compat.mlserver.model import MLModel
from dragoman.compat.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
)
from dragoman.core.errors import ModelFailed
from dragoman.system.threads import TRANSFORMERS_LOADS


class _JsonCodec(InputCodec):
    """Values as JSON in elements of BYTES."""

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        texts = [json.dumps(each, default=_plain) for each in cls._to_elements(payload)]
        shape = [1] if cls is HuggingfaceSingleJSONCodec else [len(texts), 1]
        parameters = Parameters(content_type=cls.ContentType)
        return ResponseOutput(name=name, shape=shape, datatype="BYTES", data=texts, parameters=parameters)

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        return cls._decode(response_output)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return RequestInput(**vars(cls.encode_output(name, payload)))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return cls._decode(request_input)

    @classmethod
    def _to_elements(cls, payload: Any) -> list[Any]:
        return list(payload)

    @classmethod
    def _decode(cls, tensor: Any) -> Any:
        try:
            return [json.loads(each) for each in tensor.data]
        except ValueError as error:
            raise InferenceError(f"input '{tensor.name}': expected JSON in each element: {error}") from error


@register_input_codec
class HuggingfaceListJSONCodec(_JsonCodec):
    """A list of values."""

    ContentType = "hg_jsonlist"
    TypeHint = list

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, list) and bool(payload) and all(isinstance(each, dict) for each in payload)


@register_input_codec
class HuggingfaceSingleJSONCodec(_JsonCodec):
    """One value."""

    ContentType = "hg_json"
    TypeHint = dict

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, dict)

    @classmethod
    def _to_elements(cls, payload: Any) -> list[Any]:
        return [payload]

    @classmethod
    def _decode(cls, tensor: Any) -> Any:
        return super()._decode(tensor)[0]


class HuggingFaceRuntime(MLModel):
    """A pipeline of the task `parameters.extra.task`, whose model is a folder.

    The inputs `args` and `array_inputs` are its first argument, the others are keyword arguments. The output has one
    element of JSON for each result.
    """

    _model: Any = None

    async def load(self) -> bool:
        parameters = self.settings.parameters
        assert parameters is not None
        extra: Mapping[str, Any] = parameters.extra or {}
        task = str(extra["task"]) + (str(extra.get("task_suffix") or "") if extra["task"] == "translation" else "")
        tokenizer = extra.get("pretrained_tokenizer")
        # Other weights than safetensors are pickles.
        options = {**(extra.get("model_kwargs") or {}), "use_safetensors": True}
        try:
            with TRANSFORMERS_LOADS:
                self._model = importlib.import_module("transformers").pipeline(
                    task,
                    model=str(parameters.uri),
                    tokenizer=self._folder(str(tokenizer)) if tokenizer else None,
                    device=extra.get("device"),
                    batch_size=max(self.settings.max_batch_size, 1),
                    model_kwargs=options,
                    trust_remote_code=False,
                )
        except KeyError as error:
            raise ModelFailed(f"the installed version of transformers does not have the task '{task}'") from error
        return True

    def _folder(self, name: str) -> str:
        """Return the absolute path of a folder beside the settings. Raises ModelFailed if it does not exist."""
        source = self.settings._source
        path = Path(source).parent / name if source is not None else Path(name)
        if not path.is_dir():
            raise ModelFailed(f"'{name}' is not a folder: models are not downloaded; save the model to one")
        return str(path)

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        arguments = {each.name: _value(each) for each in payload.inputs}
        texts = [*_as_list(arguments.pop("array_inputs", [])), *_as_list(arguments.pop("args", []))]
        given = () if not texts else (texts[0],) if len(texts) == 1 else (texts,)
        try:
            result = self._model(*given, **arguments)
        except Exception as error:
            if not isinstance(error, ValueError | TypeError | KeyError) and type(error).__name__ != "PipelineException":
                raise
            raise InferenceError(f"{type(self._model).__name__}: {error}") from error
        output = HuggingfaceListJSONCodec.encode_output("output", result if isinstance(result, list) else [result])
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])


def _value(tensor: RequestInput) -> Any:
    """Return the value of an input by its content type; else texts, a single number, or a list of numbers."""
    content_type = tensor.parameters.content_type if tensor.parameters is not None else None
    if content_type not in (None, "raw"):
        return decode_request_input(tensor)
    values = [each.decode() if isinstance(each, bytes) else each for each in tensor.data]
    is_single = len(values) == 1 and (content_type == "raw" or tensor.datatype != "BYTES")
    return values[0] if is_single else values


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


__all__ = ["HuggingFaceRuntime", "HuggingfaceListJSONCodec", "HuggingfaceSingleJSONCodec"]
