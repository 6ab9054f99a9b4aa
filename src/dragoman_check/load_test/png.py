"""PNG of our own plots: the elements of SVG that they use, drawn by Pillow."""

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from dragoman.core.errors import InvalidInput

# Pixels of one unit of the SVG.
_SCALE = 2
_NAMESPACE = "{http://www.w3.org/2000/svg}"
Point = tuple[float, float]


def require_pillow() -> None:
    """Raise InvalidInput if Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise InvalidInput("a PNG needs Pillow: pip install 'dragoman[images]'; an SVG needs nothing") from None


def png_of_svg(svg: str) -> bytes:
    """Return a PNG of an SVG of rectangles, lines, polylines, circles and texts; others are left out."""
    from PIL import Image, ImageDraw

    root = ET.fromstring(svg)  # noqa: S314 (written by this program)
    width, height = (round(float(number) * _SCALE) for number in root.get("viewBox", "").split()[2:])
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for element in root:
        match element.tag.removeprefix(_NAMESPACE):
            case "line":
                _draw_line(draw, element, [_point(element, "x1", "y1"), _point(element, "x2", "y2")])
            case "polyline":
                numbers = [_SCALE * float(number) for number in re.findall(r"[\d.]+", element.get("points", ""))]
                _draw_line(draw, element, [*zip(numbers[::2], numbers[1::2], strict=True)])
            case "circle":
                (x, y), radius = _point(element, "cx", "cy"), _SCALE * float(element.get("r", 0))
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=element.get("fill"))
            case "text":
                _draw_text(image, element)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _point(element: ET.Element, x: str, y: str) -> Point:
    return _SCALE * float(element.get(x, 0)), _SCALE * float(element.get(y, 0))


def _draw_line(draw: Any, element: ET.Element, points: list[Point]) -> None:
    width = round(_SCALE * float(element.get("stroke-width", 1)))
    dashes = [_SCALE * float(each) for each in element.get("stroke-dasharray", "").split()]
    for start, end in _dashes(points, *dashes) if len(dashes) == 2 else pairwise(points):
        draw.line((start, end), fill=element.get("stroke"), width=width)


def _dashes(points: list[Point], dash: float, gap: float) -> Iterator[tuple[Point, Point]]:
    """Yield the dashes along a line."""
    offset = 0.0  # within the current dash and gap
    for (x, y), (to_x, to_y) in pairwise(points):
        length = math.hypot(to_x - x, to_y - y)
        at = 0.0
        while at < length:
            step = min((dash if offset < dash else dash + gap) - offset, length - at)
            if offset < dash:
                ends = [(x + (to_x - x) * each / length, y + (to_y - y) * each / length) for each in (at, at + step)]
                yield ends[0], ends[1]
            at += step
            offset = (offset + step) % (dash + gap)


def _draw_text(image: Any, element: ET.Element) -> None:
    """Draw a text, whose position is that of its baseline; also one that is rotated by -90 degrees."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_SCALE * float(element.get("font-size", 12)))
    bold = 0.4 * _SCALE if element.get("font-weight") == "bold" else 0
    anchor = {"middle": "m", "end": "r"}.get(element.get("text-anchor", ""), "l") + "s"
    options: dict[str, Any] = {"fill": element.get("fill"), "font": font, "stroke_width": bold}
    x, y = _point(element, "x", "y")
    if "rotate(-90" not in element.get("transform", ""):
        if element.get("paint-order") == "stroke":
            ImageDraw.Draw(image).text(
                (x, y), element.text or "", anchor=anchor, font=font, fill="white", stroke_width=4
            )
        ImageDraw.Draw(image).text((x, y), element.text or "", anchor=anchor, **options)
        return
    length = round(font.getlength(element.text or "")) + 4
    size = round(2 * font.size)
    flat = Image.new("RGB", (length, size), "white")
    ImageDraw.Draw(flat).text((length / 2, size / 2), element.text or "", anchor="ms", **options)
    turned = flat.rotate(90, expand=True)
    image.paste(turned, (round(x - turned.width / 2), round(y - turned.height / 2)))
