"""`dragoman chat [URL] [MODEL]`: chat with a language model of any server of the OpenAI API."""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dragoman.cli.connection import DEFAULT_URL, KEY_HELP, ServerConnection, add_connection_arguments
from dragoman.cli.terminal import colour_text, printable
from dragoman.core.documents import parse_json
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed, ModelNotFound

_EPILOG = f"""\
In the chat: /reset starts a new conversation, /system TEXT sets the system prompt, Ctrl-C stops an answer, /exit or
Ctrl-D ends.
Without a terminal, standard input is one message, and the answer is printed.

{KEY_HELP}
examples:
  dragoman chat
  dragoman chat http://127.0.0.1:8080 my-llama --system "Answer in one sentence."
  echo "Hello" | dragoman chat my-llama
  dragoman chat my-llama --message "Hello" --json

Exit status: 0 success, 1 if an answer fails, 2 if the request is invalid or the server cannot be reached.
"""
_COMMANDS = "/reset, /system TEXT, /exit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "dragoman chat [options] [URL] [MODEL]"
    parser.description = "Chat with a language model of a running server: Dragoman, or any with the OpenAI API."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("where", nargs="*", metavar="URL", help=f"server (default: {DEFAULT_URL}), and model if it has several")
    add("--system", default="", metavar="TEXT", help="system prompt")
    add("--message", metavar="TEXT", help="send one message and print the answer")
    add("--max-tokens", type=int, metavar="N", help="longest answer in tokens (default: that of the server)")
    add("--temperature", type=float, metavar="X", help="temperature of sampling (default: that of the server)")
    add("--seed", type=int, metavar="N", help="seed of sampling")
    add_connection_arguments(parser, timeout_s=300.0)


def run(arguments: argparse.Namespace) -> int:
    """Chat; return the exit status."""
    url, model = _parse_server_and_model(arguments.where)
    connection = ServerConnection.of(arguments, url)
    options = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
    chat = ChatSession(
        connection, model or _only_model(connection), {k: v for k, v in options.items() if v is not None}
    )
    chat.reset(arguments.system)
    if arguments.message is not None or not sys.stdin.isatty():
        message = sys.stdin.read().strip() if arguments.message is None else arguments.message
        if not message:
            raise InvalidInput("expected a message on standard input or in --message")
        return _print_answer(chat, message, as_json=arguments.json)
    return _converse(chat, as_json=arguments.json)


def _parse_server_and_model(words: list[str]) -> tuple[str, str]:
    """Return the URL and the model of the arguments, in any order."""
    urls = [word for word in words if "://" in word or re.fullmatch(r"[\w.-]+:\d+", word)]
    models = [word for word in words if word not in urls]
    if len(urls) > 1 or len(models) > 1:
        raise InvalidInput(f"expected at most a URL and a MODEL, got {' '.join(words)}")
    return urls[0] if urls else DEFAULT_URL, models[0] if models else ""


def _only_model(connection: ServerConnection) -> str:
    """Return the name of the server's only language model, adapters aside. Raises InvalidInput if it has several."""
    with connection.open("/v1/models") as response:
        body = response.read()
    try:
        names = [str(each["id"]) for each in parse_json(body)["data"] if not each.get("parent")]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelFailed(f"{connection.url} does not respond as a server of the OpenAI API") from error
    if not names:
        raise ModelNotFound(f"{connection.url} has no language model")
    if len(names) > 1:
        raise InvalidInput(f"{connection.url} has several models: expected MODEL, one of {', '.join(names)}")
    return names[0]


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
    """A conversation with a model; `messages` has the turns so far."""

    connection: ServerConnection
    model: str
    options: Mapping[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self, system: str) -> None:
        """Forget the conversation; begin with a system prompt, if there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, message: str, answer: Answer) -> Iterator[str]:
        """Yield the chunks of the answer and record them in it.

        An answer that fails or is abandoned is not added to the conversation. Raises ModelFailed if the answer ends
        without a
        finish reason, or with the server's error.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "messages": messages, **options, **self.options}
        begin_s = time.monotonic()
        with self.connection.suggesting(self.model), self.connection.open("/v1/chat/completions", body) as response:
            for event in _events(response):
                text = _record(event, answer)
                if text:
                    answer.first_s = answer.first_s or time.monotonic() - begin_s
                    yield text
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


def _print_answer(chat: ChatSession, message: str, *, as_json: bool) -> int:
    """Print one answer as it arrives, and its statistics on a terminal; return the exit status."""
    answer = Answer()
    try:
        for text in chat.ask(message, answer):
            if not as_json:
                print(printable(text), end="", flush=True)
    except ModelFailed as error:
        if answer.text and not as_json:
            print()
        print(f"dragoman: {printable(error.message)}", file=sys.stderr)
        return 1
    if as_json:
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens}
        times = {"first_token_s": round(answer.first_s, 6), "total_s": round(answer.took_s, 6)}
        speed = {"tokens_per_s": answer.tokens_per_s and round(answer.tokens_per_s, 3)}
        content = {"model": chat.model, "content": answer.text, "finish_reason": answer.finish_reason}
        print(json.dumps({**content, "usage": usage, **times, **speed}), flush=True)
        return 0
    print()
    if sys.stderr.isatty():
        print(colour_text(printable(answer.statistics()), "2", sys.stderr), file=sys.stderr)
    return 0


def _converse(chat: ChatSession, *, as_json: bool) -> int:
    """Read messages from the terminal until its end."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` gets a history and line editing
    print(colour_text(f"{printable(chat.model)} at {chat.connection.url}; {_COMMANDS}", "2", sys.stdout))
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line in ("/exit", "/quit", "/bye"):
            return 0
        try:
            _handle_line(chat, line, as_json=as_json)
        except KeyboardInterrupt:
            print(colour_text("\n(stopped)", "2", sys.stdout))
        except DragomanError as error:
            print(f"dragoman: {printable(error.message)}", file=sys.stderr)


def _handle_line(chat: ChatSession, line: str, *, as_json: bool) -> None:
    command, _, rest = line.partition(" ")
    if command == "/reset":
        system = next((each["content"] for each in chat.messages if each["role"] == "system"), "")
        chat.reset(system)
    elif command == "/system":
        chat.reset(rest.strip())
    elif line.startswith("/"):
        print(f"unknown command {printable(command)}: expected {_COMMANDS}")
    elif line:
        _print_answer(chat, line, as_json=as_json)
