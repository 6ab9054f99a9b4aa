"""`dragoman models [URL]`: list the models of a running server with their inputs and outputs."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from dragoman.cli.connection import DEFAULT_URL, KEY_HELP, ServerConnection, add_connection_arguments
from dragoman.cli.terminal import table
from dragoman.core.documents import parse_json
from dragoman.core.errors import DragomanError, ModelNotFound, NotSupported
from dragoman.core.signature import TensorSpec

_DRAWN = ("detector", "segmentation")  # kinds of models whose boxes and masks the console draws
_COLUMNS = 100  # of the table, unless the name of a tensor is long
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
        print("\n".join(table([*_rows(models)])))
    return 0 if all(model["ready"] for model in models) else 1


class ModelPage:
    """What a model says of itself in the console: class names and examples; nothing of servers that have none.

    It is read when it is first needed, over HTTP.
    """

    def __init__(self, connection: ServerConnection, model: str, version: str) -> None:
        self._connection = connection
        self._name = quote(model, safe="")
        version = f"/versions/{quote(version, safe='')}" if version else ""
        self._path = f"/console/models/{self._name}{version}"

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

    @property
    def picture_hint(self) -> str:
        """Return where the answer to a photo is drawn on it; "" for a model whose answer has no places on a photo."""
        if self._content.get("kind") not in _DRAWN:
            return ""
        return f"drawn on the photo in the console: {self._connection.url}/console#/models/{self._name}"

    @property
    def outputs(self) -> list[str]:
        """Return the outputs to ask for, so that those with class names are among them; empty for the model's own."""
        outputs = self._content.get("outputs")
        return [each for each in outputs if isinstance(each, str)] if isinstance(outputs, list) else []

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


def _rows(models: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table: several for a model whose inputs or outputs would make a long line."""
    left = [("model", "versions", "platform", "state")]
    yield (*left[0], "inputs", "outputs")
    for model in models:
        state = "ready" if model["ready"] else "not ready"
        left.append((model["name"], ",".join(model["versions"]) or "-", model["platform"] or "-", state))
    left_width = sum(2 + max(map(len, column)) for column in zip(*left, strict=True))
    sides = [[[f"{t['name']} {_text(t)}" for t in model[side]] for model in models] for side in ("inputs", "outputs")]
    (least, most), (least_output, most_output) = map(_widths, sides)
    room = _COLUMNS - left_width - 2
    width = min(most_output, max(least_output, room - most, min(room // 2, room - least)))
    widths = [max(least, room - width), width]
    for cells, *both in zip(left[1:], *sides, strict=True):
        lines = [_wrapped(tensors, width) for tensors, width in zip(both, widths, strict=True)]
        for number, pair in enumerate(zip_longest(*lines, fillvalue="")):
            yield (*(cells if number == 0 else ("",) * len(cells)), *pair)


def _widths(side: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return the width of the longest tensor, and of the longest line of all tensors of a model."""
    tensors = [1 + len(each) for tensors in side for each in tensors]
    return max(tensors, default=1), max((len(", ".join(tensors)) for tensors in side), default=1)


def _wrapped(tensors: Sequence[str], width: int) -> list[str]:
    """Return tensors on lines of this width, a long one on a line of its own."""
    lines: list[str] = []
    for number, tensor in enumerate(tensors):
        text = tensor + ("," if number < len(tensors) - 1 else "")
        if lines and len(lines[-1]) + 1 + len(text) <= width:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return lines or ["-"]
