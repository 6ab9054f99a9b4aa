"""Large raw contents apart from the message that they came in, so that reading it copies none of them."""

from collections.abc import Sequence

from dragoman.formats.oip_messages import ModelInferRequest
from dragoman.formats.policy import Buffer

LARGE = 1 << 16  # bytes of a message from which on it pays
_MOST_FIELDS = 1000  # performance only: a walk over more of them costs more than it gains
_RAW_INPUT_CONTENTS: int = ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number
_DELIMITED = 2  # protobuf's wire type of what has a length
_MOST_BITS = 63
_MOST_HEAD = 6  # bytes of the tag and the length of contents, which may be written longer than they have to be


def contents_apart(body: Buffer) -> tuple[bytes, Sequence[memoryview]] | None:
    """A ModelInferRequest without its raw input contents, and these as views, in order; None where there are none.

    It walks over the fields of the outermost message alone; None also where it is broken, or of very many fields, so
    that the parser of the whole tells what is wrong.
    """
    view = memoryview(body).cast("B")
    rest: list[memoryview] = []
    contents: list[memoryview] = []
    at = done = 0
    try:
        for _ in range(_MOST_FIELDS):
            if at == len(view):
                rest.append(view[done:])
                return (b"".join(rest), contents) if contents else None
            start = at
            tag, at = varint(view, at)
            value, at = extent(view, tag, at)
            if tag == _RAW_INPUT_CONTENTS << 3 | _DELIMITED:
                if value - start > _MOST_HEAD:
                    return None
                rest.append(view[done:start])
                contents.append(view[value:at])
                done = at
    except (IndexError, ValueError):
        pass
    return None


def extent(view: memoryview, tag: int, at: int) -> tuple[int, int]:
    """Where a field's value starts and ends. Raises IndexError or ValueError where the message is broken."""
    start = end = at
    match tag & 7:  # protobuf's wire types
        case 2:  # of a given length
            size, start = varint(view, at)
            end = start + size
        case 0:  # a number
            _, end = varint(view, at)
        case 1:
            end = at + 8
        case 5:
            end = at + 4
        case _:
            raise ValueError("a group, or no field at all")
    if end > len(view):
        raise ValueError("cut off")
    return start, end


def varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number at a place, and where it ends."""
    number = shift = 0
    while True:
        digit = view[at]
        at += 1
        number |= (digit & 0x7F) << shift
        if digit < 0x80:
            return number, at
        shift += 7
        if shift > _MOST_BITS:
            raise ValueError("too long a number")
