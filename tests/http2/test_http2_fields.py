"""Header fields against the `hpack` library: each side decodes what the other encodes."""

import pytest
from hpack import Decoder as LibraryDecoder
from hpack import Encoder as LibraryEncoder
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.formats.http2.fields import Decoder, encode_fields
from dragoman.formats.http2.frames import Http2ConnectionError

NAMES = st.one_of(
    st.sampled_from([b":method", b":path", b":status", b"content-type", b"te", b"x-a", b"cookie"]),
    st.binary(min_size=1, max_size=20),
)
VALUES = st.one_of(st.sampled_from([b"", b"POST", b"200", b"trailers"]), st.binary(max_size=300))
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=12)


@settings(deadline=None)
@given(blocks=st.lists(st.tuples(FIELDS, st.booleans(), st.none() | st.integers(0, 4096)), max_size=8))
def test_blocks_of_hpack_are_decoded(blocks: list[tuple[list[tuple[bytes, bytes]], bool, int | None]]) -> None:
    encoder, decoder = LibraryEncoder(), Decoder(1 << 20)
    for fields, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        version = decoder.version
        block = encoder.encode(fields, huffman=huffman)
        assert decoder.decode(block) == fields
        if decoder.version == version:
            assert decoder.decode(block) == fields


@settings(deadline=None)
@given(fields=FIELDS)
def test_hpack_decodes_our_blocks(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = LibraryDecoder()
    for _ in range(2):
        assert [(bytes(n), bytes(v)) for n, v in decoder.decode(encode_fields(fields), raw=True)] == fields
    assert not decoder.header_table.dynamic_entries


@settings(deadline=None)
@given(block=st.binary(max_size=200), before=FIELDS)
def test_random_bytes_are_an_error_or_decoded_as_hpack_does(block: bytes, before: list[tuple[bytes, bytes]]) -> None:
    encoder, decoder, library = LibraryEncoder(), Decoder(1 << 16), LibraryDecoder()
    first = encoder.encode(before)
    decoder.decode(first)
    library.decode(first, raw=True)
    try:
        found = decoder.decode(block)
    except Http2ConnectionError:
        return
    assert found == [(bytes(n), bytes(v)) for n, v in library.decode(block, raw=True)]


def test_the_table_stays_correct_after_a_too_long_list() -> None:
    encoder, decoder = LibraryEncoder(), Decoder(100)
    assert decoder.decode(encoder.encode([(b"a", b"b" * 50), (b"c", b"d" * 50)])) == [(b"a", b"b" * 50)]
    assert decoder.too_large
    assert decoder.decode(encoder.encode([(b"c", b"d" * 50)])) == [(b"c", b"d" * 50)]
    assert not decoder.too_large


@pytest.mark.parametrize("block", [b"\x40", b"\x40\x05abc", b"\x00\x01a", b"\x7f", b"\xc0", b"\x10\x81", b"\x3f"])
def test_a_truncated_block_is_an_error(block: bytes) -> None:
    with pytest.raises(Http2ConnectionError):
        Decoder(1000).decode(block)


def test_the_version_counts_changes_of_the_table() -> None:
    decoder = Decoder(1000)
    assert decoder.decode(b"\x82\x00\x01a\x01b") == [(b":method", b"GET"), (b"a", b"b")]
    assert decoder.version == 0
    decoder.decode(b"\x40\x01a\x01b")
    changed = decoder.version
    assert changed
    decoder.decode(b"\xbe")
    assert decoder.version == changed
    decoder.decode(b"\x20")
    assert decoder.version > changed
    with pytest.raises(Http2ConnectionError):
        decoder.decode(b"\xbe")
