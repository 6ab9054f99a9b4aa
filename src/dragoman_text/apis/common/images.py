"""Images in messages: parts of OpenAI's chats, from which other APIs translate theirs."""

from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import format_value
from dragoman.core.text import PartsText


def image_part(data: str, media_type: str = "image/png") -> dict[str, Any]:
    """Return OpenAI's part for an image file in base64. Its format is found by its content."""
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def parse_image(value: Any, where: str) -> dict[str, Any]:
    """Return the part of a prompt for `image_url`, an object with `url` or a URL. Raises InvalidInput.

    Only data: URLs are accepted. If the server fetched other URLs, clients could reach hosts that only the server can.
    """
    url = value.get("url") if isinstance(value, dict) else value
    if isinstance(url, str):
        header, comma, data = url.partition(",")
        words = header[:256].lower()
        if comma and words.startswith("data:") and words.endswith(";base64"):
            return {"type": "image", "base64": data}
    raise InvalidInput(
        f"{where}: `image_url` must be a data: URL, such as data:image/png;base64,...; the server fetches no "
        f"other URLs; got {format_value(url)}"
    )


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message from its parsed parts: a text, or the parts if there are images.

    As in vLLM and llama.cpp the texts of several parts are joined by line breaks, unless the chat template takes parts.
    """
    if all(part["type"] == "text" for part in parts):
        return PartsText.of([part["text"] for part in parts])
    return parts
