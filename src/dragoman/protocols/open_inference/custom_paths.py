"""Paths of a model's own, beside those of the protocol: the model reads the request, and writes the answer, itself."""

from typing import Any

from dragoman.core.calls import Handle, Handled, Request, Response
from dragoman.core.errors import InvalidOutput
from dragoman.protocols.open_inference.headers import checked_headers
from dragoman.protocols.wire import EngineCall, HttpRequest, HttpResponse, Policy


def handle(http: HttpRequest, policy: Policy) -> EngineCall[Handled, HttpResponse]:
    """The call for whichever model has a handler at this path; ModelNotFound where none has."""
    call = Handle(
        method=http.method,
        path=http.path,
        query=http.query,
        content=bytes(http.body),
        content_type=http.headers.get("content-type", ""),
    )
    metadata = policy.forwarded(http.headers) if policy.forward_headers else {}
    return EngineCall(Request(call, metadata=metadata), _write)


def _write(response: Response[Any]) -> HttpResponse:
    answer: Handled = response.answer
    if not 200 <= answer.status <= 599:
        raise InvalidOutput(f"the model gave the status {answer.status}; expected 200 to 599")
    kind = answer.content_type.replace("\r", "").replace("\n", "")
    headers = (("content-type", kind),) if kind else ()
    return HttpResponse(answer.status, (answer.content,), headers + checked_headers(answer.metadata))
