"""The headers that a model sets beside its answer, if they are safe to send."""

import re
from collections.abc import Mapping

from dragoman.core.errors import InvalidOutput
from dragoman.protocols.wire import Headers

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)  # RFC 9110, 5.1: a token
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")  # no line break, so that no further header can be put in
# What frames and describes the answer is the server's own to say.
_OURS = re.compile(
    r"(connection|keep-alive|te|trailer|upgrade|transfer-encoding|date|server|content-.*|inference-header-.*|vary)",
    re.ASCII,
)

# gRPC: what a name of metadata is made of; those that end so hold bytes, and those that begin so are gRPC's own.
_METADATA_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)", re.ASCII)
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")


def checked_headers(metadata: Mapping[str, str]) -> Headers:
    """The headers, their names in lower case. Raises InvalidOutput naming one that is not sent."""
    return tuple(_checked(name, value) for name, value in metadata.items())


def checked_metadata(metadata: Mapping[str, str]) -> Headers:
    """The same as metadata of gRPC, which holds less."""
    found = checked_headers(metadata)
    for name, value in found:
        if _METADATA_NAME.fullmatch(name) is None or _METADATA_VALUE.fullmatch(value) is None:
            raise InvalidOutput(
                f"the model set the header {name[:64]!r}, whose name or text gRPC's metadata cannot hold"
            )
    return found


def _checked(name: str, value: str) -> tuple[str, str]:
    lower = name.lower()
    if _NAME.fullmatch(lower) is None or _OURS.fullmatch(lower) is not None:
        raise InvalidOutput(f"the model set the header {name[:64]!r}, which is not one that a model may set")
    if _VALUE.fullmatch(value) is None:
        raise InvalidOutput(f"the model set the header {name!r} to a text with characters that no header may hold")
    return lower, value.strip()
