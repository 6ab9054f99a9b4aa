"""Habits of the server that a model was written for, where they differ from Dragoman's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dragoman.core import error_texts


def _unknown(model: str, version: str, existing: Sequence[str]) -> str:
    if not version or not existing:
        return error_texts.unknown_model(model)
    there = ", ".join(filter(None, existing)) or "no versions"
    return f"{error_texts.unknown_version(model, version)}; there are {there}"


def _unknown_to_load(model: str) -> str:
    return f"{error_texts.not_in_repository(model)}: it is not in the repository"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Habits that the clients of a model rely on. Its runtime, or the files beside it, name them.

    timeout: the meaning of the request parameter `timeout`, in microseconds. `deadline`: of the response. `queue`: it
        counts while the request waits for a slot of a sequence, and in a queue that allows it to shorten its own limit.
        `none`: it is a parameter as any other, and so is `priority`.
    unknown: returns the error about a model, or a version of it, that is not served, for its name, the version, "" if
        none is named, and the versions that are served.
    unknown_to_load: returns the error about a model that is to be loaded and does not exist.
    unloads_unknown: whether to unload a model that is not loaded succeeds.
    handlers_first: whether custom handlers of models answer before the routes of protocols do.
    bare_streams: whether gRPC streams of requests with typed contents carry plain responses and end with a status.
    length_shapes: whether a single text in typed contents may have its length as its shape.
    """

    timeout: Literal["deadline", "queue", "none"] = "deadline"
    unknown: Callable[[str, str, Sequence[str]], str] = _unknown
    unknown_to_load: Callable[[str], str] = _unknown_to_load
    unloads_unknown: bool = True
    handlers_first: bool = False
    bare_streams: bool = False
    length_shapes: bool = False


OWN = Dialect()
