"""`dragoman chat [URL] [MODEL]`: chat with a language model of any server of the OpenAI API."""

import argparse
import re
import sys

from dragoman.cli.connection import DEFAULT_URL, KEY_HELP, ServerConnection, add_connection_arguments
from dragoman.core.errors import InvalidInput
from dragoman_text.cli.chat_session import ChatSession, print_answer, read_models
from dragoman_text.cli.conversation import Conversation

_EPILOG = f"""\
In the chat, /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends. A message of several lines stands between
two \"\"\", or has a backslash at the end of each line but the last. Answers are shown as Markdown with the package
rich: pip install 'dragoman[cli]'. Messages are kept for the arrow keys in ~/.local/state/dragoman/chat_history, which
only you can read.
Without a terminal, standard input is one message, and the answer is printed.

{KEY_HELP}
examples:
  dragoman chat
  dragoman chat http://127.0.0.1:8080 my-llama --system "Answer in one sentence."
  echo "Hello" | dragoman chat my-llama
  dragoman chat my-llama --message "Hello" --json
  dragoman chat my-vision-model --image photo.jpg --message "What is this?"

Exit status: 0 success, 1 if an answer fails, 2 if the request is invalid or the server cannot be reached.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "dragoman chat [options] [URL] [MODEL]"
    parser.description = "Chat with a language model of a running server: Dragoman, or any with the OpenAI API."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("where", nargs="*", metavar="URL", help=f"server (default: {DEFAULT_URL}), and model if it has several")
    add("--system", default="", metavar="TEXT", help="system prompt")
    add("--message", metavar="TEXT", help="send one message and print the answer")
    add("--image", action="append", default=[], metavar="FILE", help="picture of the first message; may be repeated")
    add("--no-markdown", action="store_true", help="show answers as they are written")
    add("--no-history", action="store_true", help="keep no messages for the arrow keys")
    add("--max-tokens", type=int, metavar="N", help="longest answer in tokens (default: that of the server)")
    add("--temperature", type=float, metavar="X", help="temperature of sampling (default: that of the server)")
    add("--seed", type=int, metavar="N", help="seed of sampling")
    add_connection_arguments(parser, timeout_s=300.0)


def run(arguments: argparse.Namespace) -> int:
    """Chat; return the exit status."""
    url, model = _parse_server_and_model(arguments.where)
    connection = ServerConnection.of(arguments, url)
    options = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
    options = {k: v for k, v in options.items() if v is not None}
    chat = ChatSession(connection, model or _only_model(connection), options)
    chat.reset(arguments.system)
    for file in arguments.image:
        chat.add_picture(file)
    if arguments.message is not None or not sys.stdin.isatty():
        message = sys.stdin.read().strip() if arguments.message is None else arguments.message
        if not message:
            raise InvalidInput("expected a message on standard input or in --message")
        return print_answer(chat, message, as_json=arguments.json)
    is_rendered = not (arguments.json or arguments.no_markdown)
    return Conversation(chat, arguments.json, is_rendered, not arguments.no_history).run()


def _parse_server_and_model(words: list[str]) -> tuple[str, str]:
    """Return the URL and the model of the arguments, in any order."""
    urls = [word for word in words if "://" in word or re.fullmatch(r"[\w.-]+:\d+", word)]
    models = [word for word in words if word not in urls]
    if len(urls) > 1 or len(models) > 1:
        raise InvalidInput(f"expected at most a URL and a MODEL, got {' '.join(words)}")
    return urls[0] if urls else DEFAULT_URL, models[0] if models else ""


def _only_model(connection: ServerConnection) -> str:
    """Return the name of the server's only language model, adapters aside. Raises InvalidInput if it has several."""
    names = [name for name, is_adapter in read_models(connection) if not is_adapter]
    if len(names) != 1:
        raise InvalidInput(f"{connection.url} has several models: expected MODEL, one of {', '.join(names)}")
    return names[0]
