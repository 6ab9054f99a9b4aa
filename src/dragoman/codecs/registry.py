"""Registry of codecs by content type: built in, from entry points, or added by the code of a model."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

from dragoman import plugins
from dragoman.codecs.codec import InputCodec, RequestCodec
from dragoman.core.errors import InvalidInput, ModelFailed

AnyCodec = type[InputCodec] | type[RequestCodec]
C = TypeVar("C", bound=AnyCodec)

# Our content types, in the order in which `can_encode` is called.
_INPUT = ("datetime", "str", "base64", "np", "pillow_image", "pd_json", "json")
_REQUEST = ("pd", "np", "str")


class CodecRegistry:
    """Codecs of single tensors ("input") and of whole requests ("request"), by content type."""

    def __init__(self) -> None:
        self._inputs: dict[str, type[InputCodec]] = {}
        self._requests: dict[str, type[RequestCodec]] = {}
        self._installed = False

    def add(self, codec: C) -> C:
        """Add a codec, which replaces another one of its content type. Can be used as a class decorator."""
        if issubclass(codec, InputCodec):
            self._inputs[codec.content_type] = codec
        else:
            self._requests[codec.content_type] = codec
        return codec

    def remove(self, content_type: str) -> None:
        """Remove the codecs of a content type; built-in and installed ones are found again on their next use."""
        self._inputs.pop(content_type, None)
        self._requests.pop(content_type, None)

    def input(self, content_type: str, where: str = "input") -> type[InputCodec]:
        """Return the codec of a content type for one tensor. Raises InvalidInput naming `where` if there is none."""
        codec = self._inputs.get(content_type) or _load("codecs.input", content_type)
        if codec is None:
            expected = ", ".join(sorted({*self._inputs, *_INPUT}))
            raise InvalidInput(f"{where}: unknown content type '{content_type}': expected one of {expected}")
        return self.add(codec)

    def request(self, content_type: str) -> type[RequestCodec] | None:
        """Return the codec of a content type for a whole request; None if there is none."""
        codec = self._requests.get(content_type) or _load("codecs.request", content_type)
        return None if codec is None else self.add(codec)

    def input_for(self, value: Any) -> type[InputCodec] | None:
        """Return the first codec that can encode a value as one tensor; None if there is none."""
        return next((c for c in self._all_inputs() if c.can_encode(value)), None)

    def request_for(self, value: Any) -> type[RequestCodec] | None:
        """Return the first codec that can encode a value as a whole request; None if there is none."""
        return next((c for c in self._all_requests() if c.can_encode(value)), None)

    def input_for_hint(self, hint: Any) -> type[InputCodec] | None:
        """Return the codec of one tensor with this type hint; None if there is none."""
        return next((c for c in self._all_inputs() if _is_same(c.type_hint, hint)), None)

    def request_for_hint(self, hint: Any) -> type[RequestCodec] | None:
        """Return the codec of a whole request with this type hint; None if there is none."""
        return next((c for c in self._all_requests() if _is_same(c.type_hint, hint)), None)

    def custom_input_for_hint(self, hint: Any) -> type[InputCodec] | None:
        """As `input_for_hint`, among the codecs that are not built in."""
        self._add_plugins()
        return next((c for n, c in self._inputs.items() if n not in _INPUT and _is_same(c.type_hint, hint)), None)

    def request_types(self) -> list[str]:
        """Return the content types of whole requests."""
        return sorted({*self._requests, *_REQUEST})

    def _add_plugins(self) -> None:
        """Add the codecs of entry points, once, except for content types that the code of a model has added."""
        if self._installed:
            return
        self._installed = True
        for group, known in (("codecs.input", self._inputs), ("codecs.request", self._requests)):
            for name in plugins.installed(group):
                if name not in known:
                    self.add(plugins.find(group, name))

    def _all_inputs(self) -> Iterator[type[InputCodec]]:
        self._add_plugins()
        yield from [c for name, c in self._inputs.items() if name not in _INPUT]  # custom ones first
        for name in _INPUT:
            with suppress(ModelFailed):  # its package is not installed, so no value can be of its type
                yield self.input(name)

    def _all_requests(self) -> Iterator[type[RequestCodec]]:
        self._add_plugins()
        yield from [c for name, c in self._requests.items() if name not in _REQUEST]
        for name in _REQUEST:
            with suppress(ModelFailed):
                codec = self.request(name)
                if codec is not None:
                    yield codec


def _is_same(known: Any, hint: Any) -> bool:
    return known is not None and (known is hint or known == hint)


def _load(group: str, content_type: str) -> Any:
    return plugins.find(group, content_type) if plugins.has(group, content_type) else None


# The registry of this process. Importing the code of a model adds its codecs, in its worker process only.
CODECS = CodecRegistry()
