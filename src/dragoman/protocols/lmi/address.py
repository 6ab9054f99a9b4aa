"""Which model a request at LMI's paths means: path, query, header or form say so, else the body."""

from collections.abc import Callable
from typing import Any

import msgspec

from dragoman.core.calls import DescribeModels, ModelDescription, Request, Response
from dragoman.core.errors import InvalidInput
from dragoman.formats.json_data import PARSER_FAULTS
from dragoman.formats.json_document import without_arrays
from dragoman.formats.json_scan import check_json
from dragoman.protocols.lmi.arrays import READERS
from dragoman.protocols.lmi.request import ANY_MODEL, is_form, is_openais, media_type, model_name
from dragoman.protocols.wire import Asked, HttpRequest, Inquiry, Policy


class _Body(msgspec.Struct, frozen=True):
    """What in a body tells which model is meant. The rest of it, which the model's own way of reading decides on, is
    passed over."""

    model: Any = None
    model_name: Any = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def fields(self) -> list[str]:
        return [name for name in ("messages", "prompt", "inputs") if getattr(self, name) is not msgspec.UNSET]


_BODY = msgspec.json.Decoder(_Body)


def addressed(http: HttpRequest, policy: Policy, then: Callable[[str], Asked]) -> Asked:
    """What `then` makes of the model's name, "" where none is named.

    In a body it is `model_name`, of a chat or a completion `model`. LMI pays no heed to the latter, so its clients send
    what they like: it counts where there is such a model, and a placeholder likewise.
    """
    name = http.params.get("model", "") or model_name(http)
    if name:
        return then(name)
    named, heeded = _in_body(http, policy)
    if not named or (heeded and named not in ANY_MODEL):
        return then(named)

    def choose(response: Response[tuple[ModelDescription, ...]]) -> Asked:
        return then(named if any(found.name == named for found in response.answer) else "")

    return Inquiry(Request(DescribeModels()), choose)


def _in_body(http: HttpRequest, policy: Policy) -> tuple[str, bool]:
    """The name in a body, "" where there is none, and whether LMI pays heed to it."""
    # The body of a large array is not gone through for a name that it does not have.
    if media_type(http) in READERS or is_form(http) or b'"model' not in bytes(http.body):
        return "", True
    try:
        text, _ = without_arrays(bytes(http.body), policy)
        check_json(text, policy)
        body = _BODY.decode(text)
    except (InvalidInput, *PARSER_FAULTS):  # told in the words of whichever model reads it
        return "", True
    openais = is_openais(body.fields())
    found = body.model if openais else body.model_name
    if not isinstance(found, str):
        return "", True
    # As at OpenAI's paths: behind a colon stands an adapter, and of `organisation/name` the name counts.
    return (found.partition(":")[0].rpartition("/")[2], False) if openais else (found, True)
