"""HTML for notebooks: tables, bars of scores and pictures, without scripts or other packages."""

import html
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Sequence

import numpy as np

from dragoman.core.datatypes import Array

_CELL = "text-align:left;padding:2px 10px;vertical-align:top"
# Bars: heights and widths in pixels.
_ROW, _LABEL, _BAR, _VALUE = 20, 150, 240, 90
_MAX_LABEL = 22
_BAR_COLOR = "#3b7dd8"
_SMALLEST_PICTURE = 96


class Html:
    """A piece of HTML that notebooks show."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return "<Html, shown by notebooks>"


def escape(text: object) -> str:
    return html.escape(str(text))


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the caption and the cells are HTML, the header is text."""
    head = "".join(f'<th style="{_CELL}">{escape(each)}</th>' for each in header)
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    title = f'<caption style="text-align:left;padding:2px 10px">{caption}</caption>'
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def code(text: str) -> str:
    return f'<code style="white-space:pre-wrap">{escape(text)}</code>'


def bars(labels: Sequence[str], values: Sequence[float], most: int) -> str:
    """Return an SVG of horizontal bars, the largest value first: at most `most`, and how many there are more."""
    order = sorted(range(len(values)), key=lambda i: -values[i])[:most]
    longest = max((abs(values[i]) for i in order), default=0.0) or 1.0
    width, lines = _LABEL + _BAR + _VALUE, []
    for row, i in enumerate(order):
        y = row * _ROW
        label = labels[i] if len(labels[i]) <= _MAX_LABEL else labels[i][: _MAX_LABEL - 1] + "…"
        length = _BAR * abs(values[i]) / longest
        lines.append(
            f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end"><title>{escape(labels[i])}</title>'
            f"{escape(label)}</text>"
            f'<rect x="{_LABEL}" y="{y + 3}" width="{max(length, 1):.1f}" height="{_ROW - 6}" rx="2" '
            f'fill="{_BAR_COLOR}" fill-opacity="{1 if values[i] >= 0 else 0.4}"/>'
            f'<text x="{_LABEL + length + 6:.1f}" y="{y + 14}">{values[i]:.3g}</text>'
        )
    rest = len(values) - len(order)
    if rest:
        lines.append(f'<text x="{_LABEL}" y="{len(order) * _ROW + 14}" fill-opacity="0.6">and {rest} more</text>')
    height = (len(order) + bool(rest)) * _ROW
    return (
        f'<svg role="img" aria-label="bars of scores" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-size="12" font-family="sans-serif" fill="currentColor">'
        f"{''.join(lines)}</svg>"
    )


def image(pixels: Array) -> str:
    """Return an image element of UINT8 pixels [H, W, 1, 3 or 4]; small ones are shown larger."""
    height, width = pixels.shape[:2]
    factor = max(1, -(-_SMALLEST_PICTURE // max(height, width)))
    url = b64encode(png(pixels)).decode()
    rendering = "pixelated" if factor > 1 else "auto"
    return (
        f'<img alt="picture of {width} x {height} pixels" src="data:image/png;base64,{url}" '
        f'width="{width * factor}" height="{height * factor}" style="image-rendering:{rendering}">'
    )


def png(pixels: Array) -> bytes:
    """Return UINT8 pixels [H, W, 1, 3 or 4] as a PNG file."""
    height, width, channels = pixels.shape
    color = {1: 0, 3: 2, 4: 6}[channels]
    # Each line begins with its filter: none.
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    file = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + file
