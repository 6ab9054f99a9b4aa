"""Base classes and registry of MLServer codecs: find them by content type, value or annotation."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from dragoman.codecs import codec as dragoman_codec
from dragoman.codecs.codec import CODECS
from dragoman.core.tensor import Tensor
from dragoman_mlserver.mlserver.codecs.errors import CodecError
from dragoman_mlserver.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
)


class InputCodec:
    """Codec of values that are one input or output."""

    ContentType: ClassVar[str] = ""
    TypeHint: ClassVar[Any] = type(None)

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return False

    @classmethod
    def encode_output(cls, name: str, payload: Any, **kwargs: Any) -> ResponseOutput:
        raise NotImplementedError

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        raise NotImplementedError

    @classmethod
    def encode_input(cls, name: str, payload: Any, **kwargs: Any) -> RequestInput:
        raise NotImplementedError

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        raise NotImplementedError

    @classmethod
    def encode(cls, name: str, payload: Any) -> ResponseOutput:
        """Deprecated name of `encode_output`."""
        return cls.encode_output(name, payload)

    @classmethod
    def decode(cls, request_input: RequestInput) -> Any:
        """Deprecated name of `decode_input`."""
        return cls.decode_input(request_input)


class RequestCodec:
    """Codec of values that are a whole request or response."""

    ContentType: ClassVar[str] = ""
    TypeHint: ClassVar[Any] = type(None)

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return False

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **kwargs: Any
    ) -> InferenceResponse:
        raise NotImplementedError

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        raise NotImplementedError

    @classmethod
    def encode_request(cls, payload: Any, **kwargs: Any) -> InferenceRequest:
        raise NotImplementedError

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        raise NotImplementedError

    @classmethod
    def encode(cls, model_name: str, payload: Any, model_version: str | None = None) -> InferenceResponse:
        """Deprecated name of `encode_response`."""
        return cls.encode_response(model_name, payload, model_version)

    @classmethod
    def decode(cls, request: InferenceRequest) -> Any:
        """Deprecated name of `decode_request`."""
        return cls.decode_request(request)


DefaultOutputPrefix = "output-"
DefaultInputPrefix = "input-"


class SingleInputRequestCodec(RequestCodec):
    """A request or response of one tensor, converted by `InputCodec`."""

    InputCodec: ClassVar[Any] = None

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return cls.InputCodec is not None and bool(cls.InputCodec.can_encode(payload))

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **kwargs: Any
    ) -> InferenceResponse:
        return InferenceResponse(
            model_name=model_name,
            model_version=model_version,
            parameters=Parameters(content_type=cls.ContentType),
            outputs=[cls.InputCodec.encode_output(f"{DefaultOutputPrefix}1", payload, **kwargs)],
        )

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        output = cls._sole(response.outputs, "output")
        return get_decoded(output) if has_decoded(output) else save_decoded(output, cls.InputCodec.decode_output)

    @classmethod
    def encode_request(cls, payload: Any, **kwargs: Any) -> InferenceRequest:
        return InferenceRequest(
            parameters=Parameters(content_type=cls.ContentType),
            inputs=[cls.InputCodec.encode_input(f"{DefaultInputPrefix}1", payload, **kwargs)],
        )

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        sole = cls._sole(request.inputs, "input")
        return get_decoded(sole) if has_decoded(sole) else save_decoded(sole, cls.InputCodec.decode_input)

    @classmethod
    def _sole(cls, tensors: list[Any], noun: str) -> Any:
        if len(tensors) != 1:
            raise CodecError(f"content type '{cls.ContentType}': expected one {noun}, got {len(tensors)}")
        return tensors[0]


def save_decoded(tensor: Any, decode: Callable[[Any], Any]) -> Any:
    """Decode an input or output; later calls return the same value."""
    tensor._decoded = decode(tensor)
    return tensor._decoded


def has_decoded(parametrised_obj: Any) -> bool:
    """Return whether an object has a decoded value or a codec."""
    return hasattr(parametrised_obj, "_decoded") or getattr(parametrised_obj, "_decoder", None) is not None


def get_decoded(parametrised_obj: Any) -> Any:
    """Return the decoded value; None without a codec."""
    codec = getattr(parametrised_obj, "_decoder", None)
    if not hasattr(parametrised_obj, "_decoded") and codec is not None:
        return save_decoded(parametrised_obj, codec.decode_input)
    return getattr(parametrised_obj, "_decoded", None)


def get_decoded_or_raw(parametrised_obj: Any) -> Any:
    """Return the decoded value; without a codec the elements of an input, or the request."""
    if has_decoded(parametrised_obj):
        return get_decoded(parametrised_obj)
    return parametrised_obj.data if hasattr(parametrised_obj, "data") else parametrised_obj


InputCodecLike = type[InputCodec] | InputCodec
RequestCodecLike = type[RequestCodec] | RequestCodec
I = TypeVar("I", bound=InputCodecLike)  # noqa: E741
R = TypeVar("R", bound=RequestCodecLike)
C = TypeVar("C")

# In the order of registration, in which `can_encode` is called.
_INPUT: dict[str, InputCodecLike] = {}
_REQUEST: dict[str, RequestCodecLike] = {}


def register_input_codec(CodecKlass: I) -> I:  # noqa: N803 - the keyword of MLServer
    """Register a codec, also for columns of data frames in Dragoman's codecs. Can be used as a class decorator."""
    _INPUT[CodecKlass.ContentType] = CodecKlass
    if CodecKlass.__module__.partition(".")[0] != __name__.partition(".")[0]:
        CODECS.add(_as_dragoman_codec(CodecKlass))
    return CodecKlass


def register_request_codec(CodecKlass: R) -> R:  # noqa: N803 - the keyword of MLServer
    """Register a codec. Can be used as a class decorator."""
    _REQUEST[CodecKlass.ContentType] = CodecKlass
    return CodecKlass


def find_input_codec(
    content_type: str | None = None, payload: Any = None, type_hint: Any = None
) -> InputCodecLike | None:
    return _find(_INPUT, content_type, payload, type_hint)


def find_request_codec(
    content_type: str | None = None, payload: Any = None, type_hint: Any = None
) -> RequestCodecLike | None:
    return _find(_REQUEST, content_type, payload, type_hint)


def find_input_codec_by_payload(payload: Any) -> InputCodecLike | None:
    return _can_encode(payload, _INPUT.values())


def find_request_codec_by_payload(payload: Any) -> RequestCodecLike | None:
    return _can_encode(payload, _REQUEST.values())


def find_input_codec_by_type_hint(type_hint: Any) -> InputCodecLike | None:
    return _find_by_hint(type_hint, _INPUT.values())


def find_request_codec_by_type_hint(type_hint: Any) -> RequestCodecLike | None:
    return _find_by_hint(type_hint, _REQUEST.values())


def _find(codecs: Mapping[str, C], content_type: str | None, payload: Any, type_hint: Any) -> C | None:
    if content_type:
        return codecs.get(content_type)
    if payload is not None:
        return _can_encode(payload, codecs.values())
    return None if type_hint is None else _find_by_hint(type_hint, codecs.values())


def _can_encode(payload: Any, codecs: Iterable[C]) -> C | None:
    can_encode: Callable[[Any], bool] = lambda codec: codec.can_encode(payload)  # noqa: E731
    return next(filter(can_encode, codecs), None)


def _find_by_hint(type_hint: Any, codecs: Iterable[C]) -> C | None:
    expected = _normalize(type_hint)
    has_hint: Callable[[Any], bool] = lambda codec: _normalize(codec.TypeHint) == expected  # noqa: E731
    return next(filter(has_hint, codecs), None)


def _normalize(hint: Any) -> Any:
    """Return the same value for `List[str]` and `list[str]`, and the class for generic arrays."""
    origin = get_origin(hint)
    return hint if origin is None else (list, *get_args(hint)) if origin is list else origin


def _as_dragoman_codec(theirs: Any) -> type[dragoman_codec.InputCodec]:
    """Return a custom codec as one of Dragoman, so that columns of a data frame may have its content type."""

    class Adapted(dragoman_codec.InputCodec):
        content_type = theirs.ContentType

        @classmethod
        def to_tensor(cls, value: Any, **options: Any) -> Tensor:
            tensor: Tensor = theirs.encode_output("value", value, **options).to_tensor()
            return tensor

        @classmethod
        def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
            return theirs.decode_input(RequestInput.from_tensor(where, tensor))

    return Adapted
