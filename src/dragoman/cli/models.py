"""`dragoman models [URL]`: list the models of a running server with their inputs and outputs."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from dragoman.cli.connection import DEFAULT_URL, KEY_HELP, ServerConnection, add_connection_arguments
from dragoman.cli.terminal import table
from dragoman.core.errors import DragomanError, ModelNotFound, NotSupported
from dragoman.core.signature import TensorSpec

_EPILOG = f"""\
{KEY_HELP}
examples:
  dragoman models
  dragoman models http://127.0.0.1:8080 iris
  dragoman models grpc://127.0.0.1:8081
  dragoman models https://models.example.org --json

Exit status: 0 if every model is ready, 1 if one is not, 2 if the models cannot be listed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "List the models of a running server: any server of the Open Inference Protocol."
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="server (default: %(default)s)")
    add("names", nargs="*", default=[], metavar="NAME", help="models to show (default: all)")
    add_connection_arguments(parser, timeout_s=10.0)


def run(arguments: argparse.Namespace) -> int:
    """Print the models; return the exit status."""
    connection = ServerConnection.of(arguments, arguments.url)
    with connection.client() as client:
        names = _names(client)
        connection.check_names(arguments.names, names)
        models = [_describe(client, name) for name in arguments.names or names]
    if arguments.json:
        print(json.dumps(models, indent=2))
    elif not models:
        print("no models")
    else:
        header = ("model", "versions", "platform", "state", "inputs", "outputs")
        print("\n".join(table([header, *map(_row, models)])))
    return 0 if all(model["ready"] for model in models) else 1


def _names(client: Any) -> list[str]:
    """Return the names of the models; servers without a list have an index."""
    try:
        names: list[str] = client.models()
        return names
    except (ModelNotFound, NotSupported):
        return list(dict.fromkeys(entry.name for entry in client.index()))


def _describe(client: Any, name: str) -> dict[str, Any]:
    try:
        metadata, reason = client.metadata(name), ""
    except DragomanError as error:
        metadata, reason = None, error.message
    return {
        "name": name,
        "versions": list(metadata.versions) if metadata else [],
        "platform": metadata.platform if metadata else "",
        "ready": client.ready(name),
        "reason": reason,
        "inputs": [_tensor(spec) for spec in metadata.signature.inputs] if metadata else [],
        "outputs": [_tensor(spec) for spec in metadata.signature.outputs] if metadata else [],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    datatype = None if spec.datatype is None else spec.datatype.name
    return {"name": spec.name, "datatype": datatype, "shape": None if spec.shape is None else list(spec.shape)}


def describe_tensor(spec: TensorSpec) -> str:
    """Return a datatype and a shape, such as FP32[-1,4]; what is unknown is left out."""
    return _text(_tensor(spec))


def _text(tensor: dict[str, Any]) -> str:
    shape = "" if tensor["shape"] is None else f"[{','.join(map(str, tensor['shape']))}]"
    return f"{tensor['datatype'] or 'any'}{shape}"


def _row(model: dict[str, Any]) -> Sequence[str]:
    sides = [", ".join(f"{t['name']} {_text(t)}" for t in model[side]) or "-" for side in ("inputs", "outputs")]
    state = "ready" if model["ready"] else "not ready"
    return model["name"], ",".join(model["versions"]) or "-", model["platform"] or "-", state, *sides
