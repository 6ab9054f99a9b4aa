"""LMI's health and management: `/ping`, and the models that are there, come and go."""

from typing import Any
from urllib.parse import parse_qs

from dragoman.core.calls import (
    Call,
    Describe,
    IndexEntry,
    Load,
    ModelDescription,
    Ready,
    Request,
    Response,
    States,
    Unload,
)
from dragoman.core.errors import InvalidInput, ModelNotFound, NotSupported
from dragoman.protocols.text import object_body
from dragoman.protocols.wire import (
    Exchange,
    HttpRequest,
    HttpResponse,
    Inquiry,
    Policy,
    Route,
    bearer_token,
    json_response,
)

_HEALTH = {"READY": "Healthy", "LOADING": "PENDING", "UNLOADING": "Unhealthy"}
_MOST_LISTED = 100


def routes(policy: Policy) -> list[Route]:
    """The rows of the table that are about models as a whole."""

    def register(http: HttpRequest) -> Exchange[None, HttpResponse]:
        return _register(http, policy)

    return [
        Route("GET", "/ping", _ping),
        Route("GET", "/models", _models),
        Route("POST", "/models", register),
        Route("GET", "/models/{model}", _model),
        Route("GET", "/models/{model}/adapters", _adapters),
        Route("GET", "/models/{model}/{version}", _model),
        Route("PUT", "/models/{model}", _scale),
        Route("DELETE", "/models/{model}", _unregister),
        Route("DELETE", "/models/{model}/{version}", _unregister),
    ]


def _ping(http: HttpRequest) -> Inquiry[bool]:
    """SageMaker looks at the status alone: 200 once every model is there, 500 where one failed, else 503."""

    def then(ready: Response[bool]) -> Exchange[tuple[IndexEntry, ...], HttpResponse]:
        def reply(response: Response[tuple[IndexEntry, ...]]) -> HttpResponse:
            told = {e.name: {"status": _HEALTH.get(e.state, "FAILED")} for e in response.answer}
            failed = any(e.state == "UNAVAILABLE" for e in response.answer)
            # Without a model, as before the first of several is loaded, the server is well all the same.
            return json_response(told, 200 if ready.answer or not told else 500 if failed else 503)

        return Exchange(Request(States()), reply)

    return Inquiry(Request(Ready()), then)


def _models(http: HttpRequest) -> Exchange[tuple[IndexEntry, ...], HttpResponse]:
    query = parse_qs(http.query)
    start, limit = _count(query, "next_page_token", 0, 1 << 31), _count(query, "limit", 1, _MOST_LISTED)

    def reply(response: Response[tuple[IndexEntry, ...]]) -> HttpResponse:
        at = start or 0
        end = at + (limit or _MOST_LISTED)
        told: dict[str, Any] = {"models": [_entry(e) for e in response.answer[at:end]]}
        if end < len(response.answer):
            told["nextPageToken"] = str(end)
        return json_response(told)

    return Exchange(Request(States()), reply)


def _count(query: dict[str, list[str]], name: str, least: int, most: int) -> int | None:
    text = query.get(name, [""])[0]
    if not text:
        return None
    if not text.isdecimal() or not least <= int(text[:12]) <= most:
        raise InvalidInput(f"`{name}` must be an integer >= {least} and <= {most}; got '{text[:64]}'")
    return int(text)


def _entry(entry: IndexEntry) -> dict[str, Any]:
    version = {"version": entry.version} if entry.version else {}
    return {"modelName": entry.name, **version, "modelUrl": entry.name, "status": entry.state}


def _model(http: HttpRequest) -> Exchange[tuple[IndexEntry, ...], HttpResponse]:
    name, version = http.params["model"], http.params.get("version", "")

    def reply(response: Response[tuple[IndexEntry, ...]]) -> HttpResponse:
        found = [e for e in response.answer if e.name == name and version in ("", e.version)]
        if not found:
            raise ModelNotFound(f"Model or workflow not found: {name[:256]}")
        return json_response([{**_entry(e), "reason": e.reason} for e in found])

    return Exchange(Request(States()), reply)


def _adapters(http: HttpRequest) -> Exchange[ModelDescription, HttpResponse]:
    def reply(response: Response[ModelDescription]) -> HttpResponse:
        names = response.answer.details.get("adapters") or ()
        return json_response({"adapters": [{"name": name} for name in names]})

    return Exchange(Request(Describe(), http.params["model"]), reply)


def _register(http: HttpRequest, policy: Policy) -> Exchange[None, HttpResponse]:
    """Load a model of the repository; SageMaker gives its name in JSON, LMI in the query."""
    query = {name: values[0] for name, values in parse_qs(http.query).items()}
    given = query if not len(http.body) else {**query, **object_body(http.body, policy)}
    name, url = given.get("model_name"), given.get("url") or ""
    if not isinstance(name, str) or not name or not isinstance(url, str):
        raise InvalidInput("`model_name` must be the name of a model in the repository")
    if url.rstrip("/").rpartition("/")[2] not in ("", name):
        raise NotSupported(f"`url`: models are loaded from the server's own repository; expected none or '{name}'")
    return _controlled(Load(bearer_token(http.headers)), name, "", f'Model "{name}" registered.')


def _unregister(http: HttpRequest) -> Exchange[None, HttpResponse]:
    name = http.params["model"]
    told = f'Model "{name}" unregistered'
    return _controlled(Unload(bearer_token(http.headers)), name, http.params.get("version", ""), told)


def _controlled(call: Call[None], name: str, version: str, told: str) -> Exchange[None, HttpResponse]:
    return Exchange(Request(call, name, version), lambda _: json_response({"status": told}))


def _scale(http: HttpRequest) -> Exchange[ModelDescription, HttpResponse]:
    raise NotSupported("workers are set when the server starts: --replicas, or `replicas` in the model's settings")
