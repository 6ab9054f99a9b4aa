"""Apply codecs to requests and results by the content type of the request, the metadata, or the default."""

from collections.abc import Mapping
from typing import Any

from dragoman.codecs.codec import CODECS
from dragoman.core.errors import InvalidInput
from dragoman_mlserver.mlserver.codecs.adapted import AdaptedInputCodec, AdaptedRequestCodec, PandasCodec
from dragoman_mlserver.mlserver.codecs.base import (
    DefaultInputPrefix,
    DefaultOutputPrefix,
    InputCodecLike,
    RequestCodec,
    RequestCodecLike,
    SingleInputRequestCodec,
    find_input_codec,
    find_input_codec_by_payload,
    find_request_codec,
    find_request_codec_by_payload,
    get_decoded,
    get_decoded_or_raw,
    has_decoded,
    save_decoded,
)
from dragoman_mlserver.mlserver.settings import ModelSettings
from dragoman_mlserver.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    MetadataTensor,
    RequestInput,
    RequestOutput,
    ResponseOutput,
)

DecodedParameterName = "_decoded_payload"

Metadata = Mapping[str, MetadataTensor]
InputOrOutput = RequestInput | ResponseOutput
Codec = InputCodecLike | RequestCodecLike
Parametrised = InferenceRequest | RequestInput | RequestOutput | ResponseOutput | InferenceResponse
Tagged = MetadataTensor | ModelSettings


def inject_batch_dimension(shape: list[int]) -> list[int]:
    """Return the shape with a second axis of length 1 if it has only one."""
    return shape if len(shape) > 1 else [*shape, 1]


# --- inputs ----------------------------------------------------------------------------------------------------


def decode_request_input(request_input: RequestInput, metadata_inputs: Metadata | None = None) -> Any:
    """Return the value of an input that has a content type; None for one without. Raises InvalidInput."""
    codec = _input_codec(request_input, metadata_inputs or {})
    return None if codec is None else save_decoded(request_input, codec.decode_input)


def decode_inference_request(
    inference_request: InferenceRequest,
    model_settings: ModelSettings | None = None,
    metadata_inputs: Metadata | None = None,
) -> Any:
    """Return the value of a request that has a content type; else the request, with the codecs of its inputs set."""
    metadata = metadata_inputs or _by_name(model_settings)
    for each in inference_request.inputs:
        each._decoder = _input_codec(each, metadata)  # type: ignore[attr-defined]
    content_type = _content_type(inference_request) or _content_type(model_settings)
    if content_type is None:
        return inference_request
    value = request_codec(content_type).decode_request(inference_request)
    inference_request._decoded = value  # type: ignore[attr-defined]
    return value


# --- outputs ---------------------------------------------------------------------------------------------------


def encode_response_output(
    payload: Any, request_output: RequestOutput, metadata_outputs: Metadata | None = None
) -> ResponseOutput | None:
    """Encode an output by the request, the metadata, or the type of the value; None if no codec can encode it."""
    metadata = (metadata_outputs or {}).get(request_output.name)
    content_type = _content_type(request_output) or _content_type(metadata)
    codec = input_codec(content_type, f"output '{request_output.name}'") if content_type else None
    codec = codec or find_input_codec_by_payload(payload)
    return None if codec is None else codec.encode_output(request_output.name, payload)


def encode_inference_response(payload: Any, model_settings: ModelSettings) -> InferenceResponse | None:
    """Encode a response by the first codec that can encode the value; None if there is none."""
    codec = find_request_codec_by_payload(payload)
    if codec is None:
        return None
    return codec.encode_response(model_settings.name, payload, model_settings.version)


# --- choice of codec -------------------------------------------------------------------------------------------


def input_codec(content_type: str, where: str) -> InputCodecLike:
    """Return the codec of a content type: a custom one, one of MLServer, or one of Dragoman. Raises InvalidInput."""
    codec = find_input_codec(content_type=content_type)
    if codec is None:
        CODECS.input(content_type, where)
        codec = type("Codec", (AdaptedInputCodec,), {"ContentType": content_type})
    return codec


def request_codec(content_type: str) -> RequestCodecLike:
    """Return the codec of a content type for a whole request. Raises InvalidInput."""
    codec = find_request_codec(content_type=content_type)
    if codec is None:
        if CODECS.request(content_type) is None:
            raise InvalidInput(f"unknown content type '{content_type}' of a request")
        codec = type("Codec", (AdaptedRequestCodec,), {"ContentType": content_type})
    return codec


def _input_codec(request_input: RequestInput, metadata: Metadata) -> InputCodecLike | None:
    content_type = _content_type(request_input) or _content_type(metadata.get(request_input.name))
    if content_type is None or content_type == PandasCodec.JsonContentType:  # of a column: for a data frame only
        return None
    request_input._content_type = content_type  # type: ignore[attr-defined]
    return input_codec(content_type, f"input '{request_input.name}'")


def _content_type(tagged: Any) -> str | None:
    content_type: str | None = getattr(getattr(tagged, "parameters", None), "content_type", None)
    return content_type or None


def _by_name(settings: ModelSettings | None) -> Metadata:
    return {each.name: each for each in settings.inputs} if settings is not None else {}


__all__ = [
    "Codec",
    "DecodedParameterName",
    "DefaultInputPrefix",
    "DefaultOutputPrefix",
    "InputOrOutput",
    "Parametrised",
    "RequestCodec",
    "SingleInputRequestCodec",
    "Tagged",
    "decode_inference_request",
    "decode_request_input",
    "encode_inference_response",
    "encode_response_output",
    "get_decoded",
    "get_decoded_or_raw",
    "has_decoded",
    "inject_batch_dimension",
]
