"""Check UBJSON before it is parsed: XGBoost's parser reads on after the end, and overflows the stack."""

_MAX_DEPTH = 64
# Bytes of the numbers, by their marker.
_SIZES = {b"i": 1, b"U": 1, b"I": 2, b"l": 4, b"L": 8, b"d": 4, b"D": 8, b"C": 1, b"Z": 0, b"N": 0, b"T": 0, b"F": 0}


def is_ubjson(data: bytes) -> bool:
    """Return whether data is one object in UBJSON (specification 12), complete and not nested deep."""
    reader = _Reader(data)
    try:
        return data[:1] == b"{" and reader.skip(1, reader.take(1)) == len(data)
    except (KeyError, RecursionError, IndexError):
        return False


class _Reader:
    """Skips values. Raises KeyError for an unknown marker, IndexError for data that ends too soon."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise IndexError
        self._at += count
        return self._data[self._at - count : self._at]

    def _length(self) -> int:
        return int.from_bytes(self.take(_SIZES[self.take(1)]), signed=True)

    def skip(self, depth: int, marker: bytes) -> int:
        """Skip the rest of a value after its marker; return the position after it."""
        if depth > _MAX_DEPTH:
            raise RecursionError
        if marker in (b"{", b"["):
            self._skip_container(depth, marker)
        elif marker in (b"S", b"H"):
            self.take(self._length())
        else:
            self.take(_SIZES[marker])
        return self._at

    def _skip_container(self, depth: int, opening: bytes) -> None:
        kind, count, closing = b"", -1, b"}" if opening == b"{" else b"]"
        if self._data[self._at : self._at + 1] == b"$":
            self.take(1)
            kind = self.take(1)
        if self._data[self._at : self._at + 1] == b"#":
            self.take(1)
            count = self._length()
        if kind in _SIZES and count >= 0 and opening == b"[":
            self.take(count * _SIZES[kind])
            return
        while count:
            if count < 0 and self._data[self._at : self._at + 1] == closing:
                self.take(1)
                return
            if opening == b"{":
                self.take(self._length())
            self.skip(depth + 1, kind or self.take(1))
            count -= 1
