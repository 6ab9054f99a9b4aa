"""The Huffman code of header texts (RFC 7541, section 5.2 and appendix B), read a byte at a time.

The code itself is taken from the public encoder of the `hpack` library; its decoder is used nowhere, for it reads whole
header blocks only.
"""

from functools import cache
from typing import Final

import hpack

# Padding is the most significant bits of the code of the end-of-string symbol: ones, and fewer than 8.
_MOST_PADDING: Final = 7
_SYMBOLS: Final = 256
_MALFORMED: Final = "a text is not in the Huffman code"

_Step = tuple[bytes, int]  # the symbols that a byte completes, and the next state


class Huffman:
    """A state machine whose states are the inner nodes of the code's tree; state 0 is the root.

    What a byte does in a state is worked out when it is first met, and remembered.
    """

    __slots__ = ("_children", "_final", "_steps")

    def __init__(self) -> None:
        # Of each inner node: its two children. A symbol's leaf is ~symbol, so that it is negative; None: no code.
        self._children: list[list[int | None]] = [[None, None]]
        for symbol in range(_SYMBOLS):
            self._insert(symbol, *_code_of(symbol))
        self._steps: list[dict[int, _Step]] = [{} for _ in self._children]
        self._final = self._padding_states()

    def decode(self, text: bytes) -> bytes:
        """Return the plain text. Raises ValueError if it is malformed."""
        state, found = 0, []
        steps = self._steps
        for byte in text:
            step = steps[state].get(byte)
            if step is None:
                step = steps[state][byte] = self._step(state, byte)
            symbols, state = step
            found.append(symbols)
        if state not in self._final:
            raise ValueError(_MALFORMED)
        return b"".join(found)

    def _insert(self, symbol: int, bits: int, length: int) -> None:
        node = 0
        for shift in range(length - 1, 0, -1):
            bit = bits >> shift & 1
            child = self._children[node][bit]
            if child is None:
                child = self._children[node][bit] = len(self._children)
                self._children.append([None, None])
            node = child
        self._children[node][bits & 1] = ~symbol

    def _step(self, state: int, byte: int) -> _Step:
        symbols = bytearray()
        for shift in range(7, -1, -1):
            child = self._children[state][byte >> shift & 1]
            if child is None:
                raise ValueError(_MALFORMED)
            if child < 0:
                symbols.append(~child)
                state = 0
            else:
                state = child
        return bytes(symbols), state

    def _padding_states(self) -> frozenset[int]:
        states = [0]
        for _ in range(_MOST_PADDING):
            child = self._children[states[-1]][1]
            assert child is not None
            states.append(child)
        return frozenset(states)


def _code_of(symbol: int) -> tuple[int, int]:
    """Return the bits of a symbol's code and their number.

    Eight equal symbols take as many bytes as the code has bits, so that there is no padding.
    """
    block = hpack.Encoder().encode([(b"", bytes((symbol,)) * 8)], huffman=True)
    length = block[2] & 0x7F  # after the literal's first byte and the empty name
    return int.from_bytes(block[3:]) >> 7 * length, length


@cache
def huffman() -> Huffman:
    """Return the one machine, made when it is first needed."""
    return Huffman()
