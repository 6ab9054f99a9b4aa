"""Forms of `multipart/form-data` (RFC 7578), without a copy of what they contain."""

import re
from email.message import Message
from typing import NamedTuple

from dragoman.core.datatypes import Buffer
from dragoman.core.errors import InvalidInput

_MAX_FIELDS = 32
_MAX_HEADER_BYTES = 8192
_MAX_BOUNDARY = 70  # RFC 2046, 5.1.1


class FormField(NamedTuple):
    """A field of a form. filename: "" if it is not a file."""

    name: str
    filename: str
    content: memoryview

    def text(self) -> str:
        """Raises InvalidInput if it is not UTF-8 or long."""
        if len(self.content) > _MAX_HEADER_BYTES:
            raise InvalidInput(f"`{self.name}`: expected at most {_MAX_HEADER_BYTES} bytes, got {len(self.content)}")
        try:
            return bytes(self.content).decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"`{self.name}`: expected UTF-8") from error


def parse_form(body: Buffer, content_type: str) -> dict[str, FormField]:
    """Return the fields of a form by name; of several with one name the last. Raises InvalidInput."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidInput(f"content-type: expected multipart/form-data with a boundary, got {content_type[:100]!r}")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise InvalidInput(f"content-type: expected a boundary of 1 to {_MAX_BOUNDARY} characters")
    view = memoryview(body)
    # The literal at its beginning makes the search fast.
    rest = rb"(--)?[ \t]*(?:\r\n|\Z)"
    delimiter = re.compile(re.escape(b"\r\n--" + boundary.encode()) + rest)
    found = re.compile(re.escape(b"--" + boundary.encode()) + rest).match(view) or delimiter.search(view)
    fields: dict[str, FormField] = {}
    while found is not None and found[1] is None:
        if len(fields) >= _MAX_FIELDS:
            raise InvalidInput(f"the form has more than {_MAX_FIELDS} fields")
        start = found.end()
        found = delimiter.search(view, start)
        if found is not None:
            field = _parse_field(view[start : found.start()])
            fields[field.name] = field
    if found is None:
        raise InvalidInput("the body is not a complete form: its last boundary is missing")
    return fields


def _parse_field(part: memoryview) -> FormField:
    head = bytes(part[:_MAX_HEADER_BYTES])
    end = head.find(b"\r\n\r\n")
    if end < 0:
        raise InvalidInput("a field of the form has no headers, or they are too long")
    header = Message()
    for line in head[:end].decode(errors="replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    name, filename = (_parameter(header, key) for key in ("name", "filename"))
    if not name:
        raise InvalidInput("a field of the form has no name: expected content-disposition: form-data; name=...")
    return FormField(name, filename, part[end + 4 :])


def _parameter(header: Message, key: str) -> str:
    value = header.get_param(key, "", "content-disposition")
    if isinstance(value, tuple):  # RFC 2231
        value = value[2]
    return str(value)
