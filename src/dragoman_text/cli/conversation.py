"""The conversation of `dragoman chat` on a terminal: lines, commands and their history."""

import base64
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dragoman.cli.files import write_file
from dragoman.cli.terminal import colour_text, is_interactive, printable
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.options import suggestion
from dragoman_text.cli.chat_session import ChatSession, PlainWriter, Writer, print_answer, read_defaults, read_models

_QUOTES = '"""'
_MAX_HISTORY = 1000
_MAX_COPIED = 100_000  # characters; terminals ignore more
# What /set takes, as the API names it: the type and which values are accepted.
_SETTINGS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number from 0, such as 0.7"),
    "top_p": (float, "a number above 0, at most 1"),
    "max_tokens": (int, "a whole number from 1"),
    "seed": (int, "a whole number"),
    "frequency_penalty": (float, "a number from -2 to 2"),
    "presence_penalty": (float, "a number from -2 to 2"),
}
_DEFAULT = "default"  # unsets a setting


class Conversation:
    """Reads messages and commands from the terminal until its end.

    renders: answers are shown as Markdown, if the package rich is installed. keeps_history: in a file of the user.
    """

    def __init__(self, chat: ChatSession, as_json: bool, renders: bool, keeps_history: bool) -> None:
        self._chat = chat
        self._as_json = as_json
        self._writer: Callable[[], Writer] = _markdown_writer() if renders else PlainWriter
        self._history = _open_history() if keeps_history else _no_history()
        self._ends = False
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("show this list", self._help),
            "/retry": ("ask the last message again", self._retry),
            "/reset": ("start a new conversation", self._reset),
            "/system": ("[TEXT]  set the system prompt, and start anew", self._system),
            "/set": ("[NAME [VALUE]]  show or change temperature, max_tokens, top_p, seed ...", self._set),
            "/model": ("[NAME]  list the models, or talk to another one", self._model),
            "/image": ("FILE  add a picture to the next message", self._image),
            "/save": ("FILE  write the conversation as Markdown, or as JSON to a .json", self._save),
            "/copy": ("copy the last answer, where the terminal allows it", self._copy),
            "/exit": ("end; so does Ctrl-D", self._exit),
        }

    def run(self) -> int:
        """Converse; return the exit status."""
        print(_dim(f"{printable(self._chat.model)} at {self._chat.connection.url}; /help lists the commands"))
        interrupts = 0
        while not self._ends:
            try:
                message = self._read()
                interrupts = 0
            except EOFError:
                print()
                break
            except KeyboardInterrupt:
                interrupts += 1
                print(_dim("\n(Ctrl-D or /exit ends)") if interrupts == 1 else "")
                if interrupts > 1:
                    break
                continue
            try:
                self._handle(message)
            except KeyboardInterrupt:
                print(_dim("(stopped)"))
            except DragomanError as error:
                print(f"dragoman: {printable(error.message)}", file=sys.stderr)
        return 0

    def _read(self) -> str:
        """Return the next message, which may have several lines. Raises EOFError at the end of the input."""
        line = input("> ").strip()
        if line.startswith(_QUOTES):
            lines = [line.removeprefix(_QUOTES)]
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(input("... "))
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
            line = "\n".join(lines).strip("\n")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input("... ")
        self._history(line)
        return line

    def _handle(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        word = {"/?": "/help", "/quit": "/exit", "/bye": "/exit"}.get(word, word)
        if word in self._commands:
            self._commands[word][1](rest.strip())
        elif message.startswith("/") and "\n" not in message:
            hint = suggestion(word, self._commands) or "; /help lists them"
            print(f"unknown command {printable(word)}{hint}")
        elif message.strip():
            self._ask(message)

    def _ask(self, message: Any) -> None:
        print_answer(self._chat, message, as_json=self._as_json, writer=self._writer())

    # --- commands ----------------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        for name, (text, _run) in self._commands.items():
            argument, separator, summary = text.rpartition("  ")
            print(f"  {f'{name} {argument}'.rstrip():<24}{summary if separator else text}")
        print(f"  {_QUOTES:<24}begins and ends a message of several lines; so does a backslash at the end of a line")
        print(f"  {'Ctrl-C':<24}stops an answer")

    def _exit(self, _: str) -> None:
        self._ends = True

    def _reset(self, _: str) -> None:
        self._chat.reset(self._chat.system)
        print(_dim("(new conversation)"))

    def _system(self, text: str) -> None:
        self._chat.reset(text)
        print(
            _dim("(new conversation with this system prompt)" if text else "(new conversation without system prompt)")
        )

    def _retry(self, _: str) -> None:
        message = self._chat.take_back()
        if message is None:
            raise InvalidInput("no message to ask again")
        self._ask(message)

    def _set(self, text: str) -> None:
        options = self._chat.options
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        value = value.strip()
        if name and name not in _SETTINGS:
            raise InvalidInput(f"unknown setting '{name}'{suggestion(name, _SETTINGS) or '; /set lists them'}")
        if not value:
            defaults = read_defaults(self._chat.connection, self._chat.model)
            for each in [name] if name else _SETTINGS:
                default = f"({f'{defaults[each]}, ' if each in defaults else ''}default of the server)"
                print(f"  {each:<20}{options.get(each, _dim(default))}")
            if name:
                print(_dim(f"  expected {_SETTINGS[name][1]}, or {_DEFAULT}"))
            return
        if value == _DEFAULT:
            options.pop(name, None)
            print(_dim(f"({name}: default of the server)"))
            return
        convert, expected = _SETTINGS[name]
        try:
            options[name] = convert(value)
        except ValueError:
            raise InvalidInput(f"{name}: expected {expected}, or {_DEFAULT}, got '{value}'") from None
        print(_dim(f"({name}: {options[name]})"))

    def _model(self, name: str) -> None:
        known = [each for each, _ in read_models(self._chat.connection)]
        if not name:
            for each in known:
                print(f"{'*' if each == self._chat.model else ' '} {printable(each)}")
            return
        if name not in known:
            hint = suggestion(name, known) or f"; expected {', '.join(known)}"
            raise InvalidInput(f"{self._chat.connection.url} has no language model '{name}'{hint}")
        self._chat.model = name
        print(_dim(f"({printable(name)})"))

    def _image(self, file: str) -> None:
        if not file:
            raise InvalidInput("expected /image FILE")
        self._chat.add_picture(os.path.expanduser(file.strip("'\"")))
        count = len(self._chat.pictures)
        print(_dim(f"({count} picture{'' if count == 1 else 's'} for the next message)"))

    def _save(self, file: str) -> None:
        if not file:
            raise InvalidInput("expected /save FILE")
        path = os.path.expanduser(file.strip("'\""))
        if os.path.exists(path):
            raise InvalidInput(f"'{path}' exists: expected another name")
        messages = self._chat.messages
        if path.endswith(".json"):
            write_file(path, json.dumps({"model": self._chat.model, "messages": messages}, indent=2) + "\n")
        else:
            write_file(path, "\n".join(f"## {each['role']}\n\n{_text(each['content'])}\n" for each in messages))
        print(_dim(f"({len(messages)} messages in {printable(path)})"))

    def _copy(self, _: str) -> None:
        text = self._chat.last_answer
        if not text:
            raise InvalidInput("no answer to copy")
        if not is_interactive(sys.stdout) or len(text) > _MAX_COPIED:
            raise InvalidInput("the answer cannot be copied; /save FILE writes the conversation")
        # The clipboard by the terminal itself (OSC 52), also through SSH.
        sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
        print(_dim(f"({len(text)} characters sent to the terminal's clipboard)"))


def _text(content: Any) -> str:
    """Return the text of a message, with a word for each picture."""
    if isinstance(content, str):
        return content
    return "\n\n".join(str(part.get("text", "(picture)")) for part in content)


def _dim(text: str) -> str:
    return colour_text(text, "2", sys.stdout)


def _markdown_writer() -> Callable[[], Writer]:
    """Return a writer of Markdown; of plain text if the package rich is missing or the output is no terminal."""
    if not is_interactive(sys.stdout):
        return PlainWriter
    try:
        from dragoman_text.cli.markdown import MarkdownWriter
    except ImportError:
        return PlainWriter
    return MarkdownWriter


# --- history ---------------------------------------------------------------------------------------------------------


def _no_history() -> Callable[[str], None]:
    """Return a function that keeps nothing; lines can be edited, and recalled until the end."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` gets line editing
    return lambda _: None


def _open_history() -> Callable[[str], None]:
    """Return a function that adds a message to the history, a file that only its user can read."""
    add = _no_history()
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    file = Path(state) / "dragoman" / "chat_history"
    try:
        import readline

        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        file.chmod(0o600)
        readline.read_history_file(file)
    except (ImportError, OSError):  # a home that cannot be written
        return add
    readline.set_auto_history(False)
    readline.set_history_length(_MAX_HISTORY)

    def keep(message: str) -> None:
        if message.strip():
            readline.add_history(message.replace("\n", " "))
            with suppress(OSError):
                readline.write_history_file(file)

    return keep
