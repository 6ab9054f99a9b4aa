"""The alphabet of byte-level vocabularies (GPT-2): each byte is one printable character."""

from collections.abc import Mapping


def _characters() -> Mapping[str, int]:
    """Return the byte of each character: printable bytes represent themselves, the others are numbered from 256."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _characters()
_WORDS = {byte: character for character, byte in BYTES.items()}


def as_bytes(word: str) -> bytes:
    """Return the bytes of a token; a word outside of the alphabet represents itself."""
    if all(character in BYTES for character in word):
        return bytes(BYTES[character] for character in word)
    return word.encode()


def as_word(content: bytes) -> str:
    """Return bytes in the alphabet."""
    return "".join(_WORDS[byte] for byte in content)
