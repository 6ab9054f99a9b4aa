"""Description of one model version: its location, its runtime and how it is run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from dragoman.core.errors import InvalidInput
from dragoman.core.options import ModelOptions, Option
from dragoman.core.options import Placement as Placement
from dragoman.core.peers import Peers
from dragoman.core.signature import TensorSpec

# Model names and versions: safe in a URL and as the name of a folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelOptions):
    """One version of one model, before it is loaded. How it is run is described in `ModelOptions`.

    url: the location given by the client that registered the model at run time; "" for models of the repository.
    target: a live Python object instead of a uri; it stays in this process.
    peers: the server's other models, for a model in the server's process; set by the server.
    """

    name: Annotated[str, Option("name that clients use; default: the name of the file or folder")]
    version: Annotated[str, Option("version that clients use; default: none, or the name of the version's folder")] = ""
    runtime: Annotated[str, Option("plug-in that loads the model: sklearn, onnx, python, ...; default: by file")] = ""
    uri: Annotated[str, Option("file or folder, or module:object or file.py:object")] = ""
    url: str = ""
    target: Any = None
    peers: Peers | None = field(default=None, compare=False, repr=False)
    platform: Annotated[str, Option("platform in the metadata; default: the runtime's")] = ""
    inputs: Annotated[
        tuple[TensorSpec, ...], Option("inputs, each with name, datatype and shape; default: the model's own")
    ] = ()
    outputs: Annotated[
        tuple[TensorSpec, ...], Option("outputs, each with name, datatype and shape; default: the model's own")
    ] = ()
    parameters: Annotated[Mapping[str, Any], Option("parameters of the runtime")] = field(default_factory=dict)
    protocols: Annotated[Mapping[str, Mapping[str, Any]], Option("a table of parameters for each protocol")] = field(
        default_factory=dict
    )


def check_name(name: str, what: str = "model name") -> str:
    """Return `name` if it is a valid name of a model or version; otherwise raise InvalidInput."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} {name!r} is not allowed; expected 1 to 256 letters, digits, '_', '-' and '.', not beginning "
            "with '.' or '-'"
        )
    return name
