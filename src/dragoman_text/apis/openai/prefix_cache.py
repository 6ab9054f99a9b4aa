"""Routes of vLLM and SGLang that reset the prefix cache of a text model."""

from urllib.parse import parse_qsl

from dragoman.core.text_engine_calls import ResetPrefixCache
from dragoman.protocols.parameters import after_authorization, build_request, ignored_header, reject_unknown
from dragoman.protocols.wire import (
    PLAIN_TEXT,
    EngineCall,
    Headers,
    HttpRequest,
    HttpResponse,
    Operation,
    Policy,
    PreliminaryCall,
    Route,
)


def routes(policy: Policy) -> list[Route]:
    """Return the routes."""

    def respond(http: HttpRequest, text: bytes) -> PreliminaryCall[None]:
        response = HttpResponse(200, (text,), (("content-type", PLAIN_TEXT), *_ignored(http, policy)))
        request = build_request(ResetPrefixCache(), http, policy)
        return after_authorization(http, EngineCall(request, lambda _: response))

    def reset(http: HttpRequest) -> PreliminaryCall[None]:
        return respond(http, b"")

    def flush(http: HttpRequest) -> PreliminaryCall[None]:
        return respond(http, b"Cache flushed.\n")

    resetting = Operation("Reset the prefix cache", {200: {}})
    flushing = Operation("Reset the prefix cache, as with SGLang", {200: {"text/plain": None}})
    return [
        Route("POST", f"{base}/{name}", endpoint, role="admin", operation=operation)
        for base in ("", "/models/{model}")
        for name, endpoint, operation in (
            ("reset_prefix_cache", reset, resetting),
            ("flush_cache", flush, flushing),
        )
    ]


def _ignored(http: HttpRequest, policy: Policy) -> Headers:
    """Return the header that names parameters of the query, none of which has an effect. Raises InvalidInput in strict
    mode if there are any."""
    names = [name for name, _ in parse_qsl(http.query, keep_blank_values=True)]
    reject_unknown(names, (), policy)
    return ignored_header(names)
