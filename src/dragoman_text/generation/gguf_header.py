"""Read from the header of a GGUF file how its weights are quantized.

The header has magic bytes, a version, the numbers of tensors and of metadata, then the metadata: key, type and value.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import gguf

_FILE_TYPE = "general.file_type"
_COUNTS_AT = 16  # behind magic bytes, version and number of tensors
# Formats of scalars by their type in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Longer values are those of the tokenizer, behind all that describes the file.
_MAX_LENGTH = 1 << 16


def quantization(path: Path) -> str:
    """Return the quantization that a file states, such as Q4_1 or F16; "" if it states none."""
    try:
        with path.open("rb") as file:
            file.seek(_COUNTS_AT)
            for _ in range(_scalar(file, "Q")):
                name, value = _string(file), _value(file, _scalar(file, "I"))
                if name == _FILE_TYPE:
                    return gguf.LlamaFileType(value).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (OSError, ValueError, KeyError, struct.error):
        pass  # the file is loaded nevertheless
    return ""


def _scalar(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]


def _length(file: BinaryIO) -> int:
    length: int = _scalar(file, "Q")
    if length > _MAX_LENGTH:
        raise ValueError(f"a value of {length} elements")
    return length


def _string(file: BinaryIO) -> str:
    return file.read(_length(file)).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner = _scalar(file, "I")
        return [_value(file, inner) for _ in range(_length(file))]
    return _scalar(file, _SCALARS[kind])
