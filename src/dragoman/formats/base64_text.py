"""Base64 as clients write files into JSON: in lines, without padding, or of the alphabet for URLs."""

from base64 import b64decode


def decode_base64(text: bytes) -> bytes:
    """Return the bytes of a file. White space is ignored, as in MIME (RFC 2045). Raises ValueError."""
    plain = b"".join(text.split()).replace(b"-", b"+").replace(b"_", b"/")
    return b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
