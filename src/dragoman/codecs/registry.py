"""Which codec speaks a content type: built in, by entry point, or registered by a model's own code."""

from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any, TypeVar

from dragoman import plugins
from dragoman.codecs.codec import InputCodec, RequestCodec
from dragoman.core.errors import InvalidInput, ModelFailed

AnyCodec = type[InputCodec] | type[RequestCodec]
C = TypeVar("C", bound=AnyCodec)

# In the order in which they are asked whether they can encode a value.
_INPUT = {
    "datetime": "dragoman.codecs.datetime:DatetimeCodec",
    "str": "dragoman.codecs.string:StringCodec",
    "base64": "dragoman.codecs.base64:Base64Codec",
    "np": "dragoman.codecs.numpy:NumpyCodec",
    "pillow_image": "dragoman.codecs.image:PillowImageCodec",
    "pd_json": "dragoman.codecs.json:PandasJsonCodec",
    "json": "dragoman.codecs.json:JsonCodec",
}
_REQUEST = {
    "pd": "dragoman.codecs.pandas:PandasCodec",
    "np": "dragoman.codecs.numpy:NumpyRequestCodec",
    "str": "dragoman.codecs.string:StringRequestCodec",
}


class Registry:
    """Codecs by content type, at the level of one tensor and of a whole request."""

    def __init__(self) -> None:
        self._inputs: dict[str, type[InputCodec]] = {}
        self._requests: dict[str, type[RequestCodec]] = {}
        self._installed = False

    def add(self, codec: C) -> C:
        """Let a codec speak for its content type, in place of one that did. Can be used as a decorator."""
        if issubclass(codec, InputCodec):
            self._inputs[codec.content_type] = codec
        else:
            self._requests[codec.content_type] = codec
        return codec

    def remove(self, content_type: str) -> None:
        """Forget the codecs of a content type; those that are built in or installed come back when asked for."""
        self._inputs.pop(content_type, None)
        self._requests.pop(content_type, None)

    def input(self, content_type: str, where: str = "input") -> type[InputCodec]:
        """The codec of a content type for one tensor; InvalidInput, naming `where`, if there is none."""
        found = self._inputs.get(content_type) or _found("codecs.input", _INPUT, content_type)
        if found is None:
            raise InvalidInput(_unknown(where, content_type, {*self._inputs, *_INPUT}))
        return self.add(found)

    def request(self, content_type: str) -> type[RequestCodec] | None:
        """The codec of a content type for a whole request; None if there is none."""
        found = self._requests.get(content_type) or _found("codecs.request", _REQUEST, content_type)
        return None if found is None else self.add(found)

    def input_for(self, value: Any) -> type[InputCodec] | None:
        """The codec that takes a value as one tensor; None if none does."""
        return next((c for c in self._all_inputs() if c.can_encode(value)), None)

    def request_for(self, value: Any) -> type[RequestCodec] | None:
        """The codec that takes a value as a whole request; None if none does."""
        return next((c for c in self._all_requests() if c.can_encode(value)), None)

    def hinted_input(self, hint: Any) -> type[InputCodec] | None:
        """The codec of one tensor whose type hint this is; None if there is none."""
        return next((c for c in self._all_inputs() if _same(c.type_hint, hint)), None)

    def hinted_request(self, hint: Any) -> type[RequestCodec] | None:
        """The codec of a whole request whose type hint this is; None if there is none."""
        return next((c for c in self._all_requests() if _same(c.type_hint, hint)), None)

    def own_input(self, hint: Any) -> type[InputCodec] | None:
        """As `hinted_input`, among the codecs that are not built in."""
        self._add_installed()
        return next((c for n, c in self._inputs.items() if n not in _INPUT and _same(c.type_hint, hint)), None)

    def request_types(self) -> list[str]:
        """The content types that are known for whole requests."""
        return sorted({*self._requests, *_REQUEST})

    def _add_installed(self) -> None:
        """Add what other packages bring, once, unless a model's own code speaks for the same content type."""
        if self._installed:
            return
        self._installed = True
        for group, known in (("codecs.input", self._inputs), ("codecs.request", self._requests)):
            for entry in entry_points(group=f"dragoman.{group}"):
                if entry.name not in known:
                    self.add(entry.load())

    def _all_inputs(self) -> Iterator[type[InputCodec]]:
        self._add_installed()
        yield from [c for name, c in self._inputs.items() if name not in _INPUT]  # a model's own go first
        for name in _INPUT:
            with suppress(ModelFailed):  # its package is not installed, so no value is of its kind
                yield self.input(name)

    def _all_requests(self) -> Iterator[type[RequestCodec]]:
        self._add_installed()
        yield from [c for name, c in self._requests.items() if name not in _REQUEST]
        for name in _REQUEST:
            with suppress(ModelFailed):
                codec = self.request(name)
                if codec is not None:
                    yield codec


def _same(known: Any, hint: Any) -> bool:
    return known is not None and (known is hint or known == hint)


def _found(group: str, built_in: dict[str, str], content_type: str) -> Any:
    if content_type in built_in:
        return plugins.resolve(built_in[content_type])
    return next((entry.load() for entry in entry_points(group=f"dragoman.{group}", name=content_type)), None)


def _unknown(where: str, content_type: str, known: set[str]) -> str:
    return f"{where}: content type '{content_type}' is not known; expected one of {', '.join(sorted(known))}"


# The registry of this process. A model's own codecs are added when its code is imported, in its worker.
CODECS = Registry()
