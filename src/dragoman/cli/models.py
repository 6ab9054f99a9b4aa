"""`dragoman models [URL]`: list the models of a running server with their inputs and outputs."""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

from dragoman.cli.connection import DEFAULT_URL, KEY_HELP, ServerConnection, add_connection_arguments
from dragoman.cli.terminal import table
from dragoman.core.documents import parse_json
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


class ModelPage:
    """What a model says of itself in the console: class names and examples; nothing of servers that have none.

    It is read when it is first needed, over HTTP.
    """

    def __init__(self, connection: ServerConnection, model: str, version: str) -> None:
        self._connection = connection
        version = f"/versions/{quote(version, safe='')}" if version else ""
        self._path = f"/console/models/{quote(model, safe='')}{version}"

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        try:
            with self._connection.open(self._path) as response:
                content: Mapping[str, Any] = parse_json(response.read())
        except (DragomanError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Return the class names by output and index."""
        labels = self._content.get("labels")
        return {k: v for k, v in labels.items() if isinstance(v, list)} if isinstance(labels, dict) else {}

    def example_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an input in the example that the model answers; () if it has none."""
        try:
            found = next(each for each in self._content["examples"][0]["inputs"] if each["name"] == name)
            return tuple(map(int, found["shape"]))
        except (LookupError, TypeError, ValueError, StopIteration):
            return ()


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
