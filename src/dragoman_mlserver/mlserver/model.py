"""The class that custom models derive from."""

from collections.abc import AsyncIterator
from typing import Any

from dragoman_mlserver.mlserver.codecs.base import InputCodecLike, RequestCodecLike
from dragoman_mlserver.mlserver.codecs.errors import CodecNotFound
from dragoman_mlserver.mlserver.codecs.utils import (
    decode_inference_request,
    decode_request_input,
    encode_inference_response,
    encode_response_output,
    get_decoded,
    has_decoded,
)
from dragoman_mlserver.mlserver.settings import ModelSettings
from dragoman_mlserver.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    MetadataModelResponse,
    MetadataTensor,
    RequestInput,
    RequestOutput,
    ResponseOutput,
)


class MLModel:
    """Base class of models: override `load`, and `predict` or `predict_stream`."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self.ready = False

    # --- to be overridden ---------------------------------------------------------------------------

    async def load(self) -> bool:
        """Load the model; return whether it is ready."""
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        raise NotImplementedError("predict() method not implemented")

    def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        raise NotImplementedError("predict_stream() method not implemented")

    async def unload(self) -> bool:
        """Release the resources of `load`."""
        return True

    # --- settings -------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def version(self) -> str | None:
        return self._settings.version

    @property
    def settings(self) -> ModelSettings:
        return self._settings

    @property
    def inputs(self) -> list[MetadataTensor]:
        return self._settings.inputs

    @inputs.setter
    def inputs(self, value: list[MetadataTensor]) -> None:
        self._settings.inputs = value

    @property
    def outputs(self) -> list[MetadataTensor]:
        return self._settings.outputs

    @outputs.setter
    def outputs(self, value: list[MetadataTensor]) -> None:
        self._settings.outputs = value

    async def metadata(self) -> MetadataModelResponse:
        own = self._settings
        return MetadataModelResponse(
            name=own.name, versions=own.versions, platform=own.platform, inputs=own.inputs, outputs=own.outputs
        )

    # --- codecs ----------------------------------------------------------------------------------------------

    def decode(self, request_input: RequestInput, default_codec: InputCodecLike | None = None) -> Any:
        """Decode an input by the request, the metadata or the default codec; else return its elements."""
        decode_request_input(request_input, {m.name: m for m in self.inputs})
        if has_decoded(request_input):
            return get_decoded(request_input)
        return request_input.data if default_codec is None else default_codec.decode_input(request_input)

    def decode_request(self, inference_request: InferenceRequest, default_codec: RequestCodecLike | None = None) -> Any:
        """Decode a request by its content type, the metadata or the default codec; else return the request."""
        value = decode_inference_request(inference_request, self._settings)
        if has_decoded(inference_request) or default_codec is None:
            return value
        return default_codec.decode_request(inference_request)

    def encode_response(self, payload: Any, default_codec: RequestCodecLike | None = None) -> InferenceResponse:
        """Encode a response by the type of the value, or by the default codec. Raises CodecNotFound."""
        response = encode_inference_response(payload, self._settings)
        if response is not None:
            return response
        if default_codec is None:
            raise CodecNotFound(payload_type=str(type(payload)), is_request=True)
        return default_codec.encode_response(self.name, payload, self.version)

    def encode(
        self, payload: Any, request_output: RequestOutput, default_codec: InputCodecLike | None = None
    ) -> ResponseOutput:
        """Encode an output by the request, the metadata, its type, or the default codec. Raises CodecNotFound."""
        output = encode_response_output(payload, request_output, {m.name: m for m in self.outputs})
        if output is not None:
            return output
        if default_codec is None:
            raise CodecNotFound(name=request_output.name)
        return default_codec.encode_output(request_output.name, payload)
