"""Find the model that an LMI request means: by path, query, header or form, or else by the body."""

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
from dragoman.protocols.wire import EndpointResult, HttpRequest, Policy, PreliminaryCall


class _Body(msgspec.Struct, frozen=True):
    """The fields of a body that name a model; the others are not parsed here."""

    model: Any = None
    model_name: Any = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def fields(self) -> list[str]:
        return [name for name in ("messages", "prompt", "inputs") if getattr(self, name) is not msgspec.UNSET]


_BODY = msgspec.json.Decoder(_Body)


def addressed(http: HttpRequest, policy: Policy, then: Callable[[str], EndpointResult]) -> EndpointResult:
    """Call `then` with the name of the model, "" for none.

    The field is `model_name`, or `model` in chats and completions of OpenAI. LMI ignores the latter, and its clients
    send any value: it counts only if such a model exists, or if it is a placeholder.
    """
    name = http.params.get("model", "") or model_name(http)
    if name:
        return then(name)
    named, heeded = _in_body(http, policy)
    if not named or (heeded and named not in ANY_MODEL):
        return then(named)

    def choose(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
        return then(named if any(found.name == named for found in response.answer) else "")

    return PreliminaryCall(Request(DescribeModels()), choose)


def _in_body(http: HttpRequest, policy: Policy) -> tuple[str, bool]:
    """Return the name in a body, "" for none, and whether LMI itself uses it."""
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
