"""A conversation with a language model over the OpenAI API, and its answers on standard output."""

import json
import sys
import time
from base64 import b64encode
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from dragoman.cli.connection import ServerConnection
from dragoman.cli.files import read_file
from dragoman.cli.terminal import colour_text, printable
from dragoman.core.documents import parse_json
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed, ModelNotFound

_PICTURE_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}


def read_models(connection: ServerConnection) -> list[tuple[str, bool]]:
    """Return the server's language models, and whether each is an adapter.

    Raises ModelFailed for another server, and ModelNotFound if it has none.
    """
    with connection.open("/v1/models") as response:
        body = response.read()
    try:
        models = [(str(each["id"]), bool(each.get("parent"))) for each in parse_json(body)["data"]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelFailed(f"{connection.url} does not respond as a server of the OpenAI API") from error
    if not models:
        raise ModelNotFound(f"{connection.url} has no language model")
    return models


def read_defaults(connection: ServerConnection, model: str) -> dict[str, float]:
    """Return the model's own default for each setting that has one, by the names of the OpenAI API.

    Empty if the server does not say, as one that is no Dragoman or whose key only infers.
    """
    with suppress(DragomanError, ValueError, LookupError, TypeError, AttributeError):
        with connection.open(f"/v2/models/{quote(model, safe='')}") as response:
            defaults = parse_json(response.read())["details"]["default_parameters"]
        names = {"max_new_tokens": "max_tokens"}
        numbers = {key: value for key, value in defaults.items() if type(value) in (int, float)}
        return {names.get(key, key): value for key, value in numbers.items()}
    return {}


@dataclass
class Answer:
    """An answer while it arrives. first_s, took_s: seconds to its first token and to its end.

    The numbers of tokens are None if the server does not report them.
    """

    text: str = ""
    finish_reason: str = ""
    tokens: int | None = None
    prompt_tokens: int | None = None
    first_s: float = 0.0
    took_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one by the time that they took; None if that is unknown."""
        rest_s = self.took_s - self.first_s
        return (self.tokens - 1) / rest_s if self.tokens and self.tokens > 1 and rest_s > 0 else None

    def statistics(self) -> str:
        count = "" if self.tokens is None else f"{self.tokens} tokens, "
        speed = f"{self.tokens_per_s:.3g} tokens/s, " if self.tokens_per_s else ""
        reason = f", {self.finish_reason}" if self.finish_reason else ""
        return f"{count}{speed}first after {self.first_s:.2f} s{reason}"


@dataclass
class ChatSession:
    """A conversation with a model; `messages` has the turns so far, `pictures` the data URLs for the next one."""

    connection: ServerConnection
    model: str
    options: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    asked: Any = None  # the content of the last message, also if its answer failed

    def reset(self, system: str) -> None:
        """Forget the conversation; begin with a system prompt, if there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []
        self.asked = None

    @property
    def system(self) -> str:
        return next((str(each["content"]) for each in self.messages if each["role"] == "system"), "")

    @property
    def last_answer(self) -> str:
        answers = [str(each["content"]) for each in self.messages if each["role"] == "assistant"]
        return answers[-1] if answers else ""

    def add_picture(self, file: str) -> None:
        """Add a picture to the next message. Raises InvalidInput if it cannot be read."""
        kind = _PICTURE_TYPES.get(Path(file).suffix.lower())
        if kind is None:
            raise InvalidInput(f"expected a picture ({', '.join(_PICTURE_TYPES)}), got '{file}'")
        content = read_file(file)
        self.pictures.append(f"data:image/{kind};base64,{b64encode(content).decode()}")

    def take_back(self) -> Any:
        """Remove the last message and its answer; return the message, None if there is none."""
        asked, self.asked = self.asked, None
        at = max((i for i, each in enumerate(self.messages) if each["role"] == "user"), default=-1)
        if asked is not None and at >= 0 and self.messages[at]["content"] is asked:
            del self.messages[at:]
        return asked

    def _content(self, message: str) -> Any:
        """Return the content of a message, with the pictures that were added for it."""
        pictures, self.pictures = self.pictures, []
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        return [*parts, {"type": "text", "text": message}] if parts else message

    def ask(self, message: Any, answer: Answer) -> Generator[str, None, None]:
        """Yield the chunks of the answer and record them in it.

        message: text, or the content of an earlier message. An answer that is interrupted stays in the conversation as
        far as it has come, one that fails does not. Raises ModelFailed if the answer ends without a finish reason, or
        with the server's error.
        """
        self.asked = self._content(message) if isinstance(message, str) else message
        messages = [*self.messages, {"role": "user", "content": self.asked}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "messages": messages, **options, **self.options}
        begin_s = time.monotonic()
        try:
            with self.connection.suggesting(self.model), self.connection.open("/v1/chat/completions", body) as response:
                for event in _events(response):
                    text = _record(event, answer)
                    if text:
                        answer.first_s = answer.first_s or time.monotonic() - begin_s
                        yield text
        except (KeyboardInterrupt, GeneratorExit):
            if answer.text:
                self.messages = [*messages, {"role": "assistant", "content": answer.text}]
            raise
        answer.took_s = time.monotonic() - begin_s
        if not answer.finish_reason:
            raise ModelFailed("the answer ended before it was complete")
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON of server-sent events."""
    for line in response:
        data = line.decode(errors="replace").strip().removeprefix("data:").strip()
        if not line.startswith(b"data:") or data == "[DONE]":
            continue
        try:
            event = parse_json(data)
        except ValueError as error:
            raise ModelFailed(f"the server's answer cannot be read: {data[:200]}") from error
        if isinstance(event, dict):
            yield event


def _record(event: Mapping[str, Any], answer: Answer) -> str:
    """Add an event to the answer; return its text."""
    if error := event.get("error"):
        raise ModelFailed(str(error.get("message", error) if isinstance(error, dict) else error))
    text = ""
    try:
        usage = event.get("usage") or {}
        answer.tokens = _count(usage.get("completion_tokens"), answer.tokens)
        answer.prompt_tokens = _count(usage.get("prompt_tokens"), answer.prompt_tokens)
        for choice in event.get("choices") or ():
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text += (choice.get("delta") or {}).get("content") or ""
    except (AttributeError, TypeError) as error:
        raise ModelFailed(f"the server's answer cannot be read: {json.dumps(event)[:200]}") from error
    answer.text += text
    return text


def _count(value: Any, default: int | None) -> int | None:
    return value if isinstance(value, int) else default


# --- output ----------------------------------------------------------------------------------------------------------


class Writer(Protocol):
    """Shows an answer while it arrives."""

    def write(self, text: str) -> None: ...

    def end(self) -> None:
        """Finish the answer, which may have been interrupted."""


class PlainWriter:
    """Prints the text as it is."""

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def end(self) -> None:
        print()


def print_answer(chat: ChatSession, message: Any, *, as_json: bool, writer: Writer | None = None) -> int:
    """Print one answer as it arrives, and its statistics on a terminal; return the exit status."""
    answer = Answer()
    writer = writer or PlainWriter()
    try:
        with closing(chat.ask(message, answer)) as chunks:
            for text in chunks:
                if not as_json:
                    writer.write(printable(text))
    except ModelFailed as error:
        if answer.text and not as_json:
            writer.end()
        print(f"dragoman: {printable(error.message)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if answer.text and not as_json:
            writer.end()
        raise
    if as_json:
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens}
        times = {"first_token_s": round(answer.first_s, 6), "total_s": round(answer.took_s, 6)}
        speed = {"tokens_per_s": answer.tokens_per_s and round(answer.tokens_per_s, 3)}
        content = {"model": chat.model, "content": answer.text, "finish_reason": answer.finish_reason}
        print(json.dumps({**content, "usage": usage, **times, **speed}), flush=True)
        return 0
    writer.end()
    if sys.stderr.isatty():
        print(colour_text(printable(answer.statistics()), "2", sys.stderr), file=sys.stderr)
    return 0
