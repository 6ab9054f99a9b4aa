"""Codecs as custom code writes and finds them: by content type, by value or by annotation."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from dragoman.codecs import codec as house
from dragoman.codecs.registry import CODECS
from dragoman.compat.mlserver.types import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput
from dragoman.core.tensor import Tensor


class InputCodec:
    """Values that fit into one input or output."""

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
        """The old name of `encode_output`."""
        return cls.encode_output(name, payload)

    @classmethod
    def decode(cls, request_input: RequestInput) -> Any:
        """The old name of `decode_input`."""
        return cls.decode_input(request_input)


class RequestCodec:
    """Values that a whole request or answer makes up."""

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
        """The old name of `encode_response`."""
        return cls.encode_response(model_name, payload, model_version)

    @classmethod
    def decode(cls, request: InferenceRequest) -> Any:
        """The old name of `decode_request`."""
        return cls.decode_request(request)


InputCodecLike = type[InputCodec] | InputCodec
RequestCodecLike = type[RequestCodec] | RequestCodec
I = TypeVar("I", bound=InputCodecLike)  # noqa: E741
R = TypeVar("R", bound=RequestCodecLike)
C = TypeVar("C")

# In the order of registration, which is the order in which they are asked whether they can encode a value.
_INPUT: dict[str, InputCodecLike] = {}
_REQUEST: dict[str, RequestCodecLike] = {}


def register_input_codec(CodecKlass: I) -> I:  # noqa: N803 - their keyword
    """Let a codec speak for its content type, to the codecs of tables here too. Can be used as a decorator."""
    _INPUT[CodecKlass.ContentType] = CodecKlass
    if CodecKlass.__module__.partition(".")[0] != __name__.partition(".")[0]:
        CODECS.add(_for_the_house(CodecKlass))
    return CodecKlass


def register_request_codec(CodecKlass: R) -> R:  # noqa: N803 - their keyword
    """Let a codec speak for its content type. Can be used as a decorator."""
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
    return _hinted(type_hint, _INPUT.values())


def find_request_codec_by_type_hint(type_hint: Any) -> RequestCodecLike | None:
    return _hinted(type_hint, _REQUEST.values())


def _find(codecs: Mapping[str, C], content_type: str | None, payload: Any, type_hint: Any) -> C | None:
    if content_type:
        return codecs.get(content_type)
    if payload is not None:
        return _can_encode(payload, codecs.values())
    return None if type_hint is None else _hinted(type_hint, codecs.values())


def _can_encode(payload: Any, codecs: Iterable[C]) -> C | None:
    asked: Callable[[Any], bool] = lambda c: c.can_encode(payload)  # noqa: E731
    return next(filter(asked, codecs), None)


def _hinted(type_hint: Any, codecs: Iterable[C]) -> C | None:
    wanted = _plain(type_hint)
    asked: Callable[[Any], bool] = lambda c: _plain(c.TypeHint) == wanted  # noqa: E731
    return next(filter(asked, codecs), None)


def _plain(hint: Any) -> Any:
    """`List[str]` and `list[str]` alike; of generic arrays the class alone."""
    origin = get_origin(hint)
    return hint if origin is None else (list, *get_args(hint)) if origin is list else origin


def _for_the_house(theirs: Any) -> type[house.InputCodec]:
    """A custom codec as one of ours, so that a column of a table may have its content type."""

    class Adapted(house.InputCodec):
        content_type = theirs.ContentType

        @classmethod
        def to_tensor(cls, value: Any, **options: Any) -> Tensor:
            tensor: Tensor = theirs.encode_output("value", value, **options).to_tensor()
            return tensor

        @classmethod
        def to_value(cls, tensor: Tensor, where: str = "tensor") -> Any:
            return theirs.decode_input(RequestInput.from_tensor(where, tensor))

    return Adapted
