"""LMI's health check and management of models: `/ping`, list, register, scale and unregister."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

from dragoman.core.calls import (
    MAX_REPLICAS,
    Call,
    Describe,
    DescribeModels,
    IndexEntry,
    Load,
    ModelDescription,
    Ready,
    Request,
    Response,
    ScaleModel,
    States,
    Unload,
)
from dragoman.core.errors import InvalidInput, ModelNotFound
from dragoman.core.text_engine_calls import LoadAdapter, UnloadAdapter
from dragoman.protocols.parameters import after_authorization, ignored_header, object_body, reject_unknown, require_text
from dragoman.protocols.wire import (
    EngineCall,
    Headers,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    Route,
    bearer_token,
    json_response,
)
from dragoman_text.apis.common.model_ids import text_model_ids
from dragoman_text.apis.lmi import messages

_HEALTH = {"READY": "Healthy", "LOADING": "PENDING", "UNLOADING": "Unhealthy"}
_MAX_DIGITS = 12


def routes(policy: Policy) -> list[Route]:
    """Return the routes of the management API."""

    def register(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        return _register(http, policy)

    def scale(http: HttpRequest) -> EngineCall[None, HttpResponse]:
        return _scale(http, policy)

    return [
        Route("GET", "/ping", _ping, health=True, operation=messages.PING),
        Route("GET", "/models", _models, role="read", operation=messages.MODELS),
        Route("POST", "/models", register, role="admin", operation=messages.REGISTER),
        Route("GET", "/models/{model}", _model, role="read", operation=messages.MODEL),
        *_adapter_routes(policy),
        Route("GET", "/models/{model}/{version}", _model, role="read", operation=messages.MODEL),
        Route("PUT", "/models/{model}", scale, role="admin", operation=messages.SCALE),
        Route("PUT", "/models/{model}/{version}", scale, role="admin", operation=messages.SCALE),
        Route("DELETE", "/models/{model}", _unregister, role="admin", operation=messages.UNREGISTER),
        Route("DELETE", "/models/{model}/{version}", _unregister, role="admin", operation=messages.UNREGISTER),
    ]


def _adapter_routes(policy: Policy) -> list[Route]:
    def add(http: HttpRequest) -> PreliminaryCall[None]:
        return _load_adapter(http, policy, "", "registered")

    def update(http: HttpRequest) -> PreliminaryCall[None]:
        return _load_adapter(http, policy, http.params["adapter"], "updated")

    routes = []
    for base in ("/adapters", "/models/{model}/adapters"):
        one = f"{base}/{{adapter}}"
        routes += [
            Route("GET", base, _adapters, role="read", operation=messages.ADAPTERS),
            Route("POST", base, add, role="admin", operation=messages.ADD_ADAPTER),
            Route("GET", one, _adapter, role="read", operation=messages.ADAPTER),
            Route("DELETE", one, _remove_adapter, role="admin", operation=messages.REMOVE_ADAPTER),
            Route("POST", f"{one}/update", update, role="admin", operation=messages.UPDATE_ADAPTER),
        ]
    return routes


def _ping(http: HttpRequest) -> PreliminaryCall[bool]:
    """SageMaker uses only the status: 200 if every model is ready, 500 if one failed, else 503."""

    def then(ready: Response[bool]) -> EngineCall[tuple[IndexEntry, ...], HttpResponse]:
        def reply(response: Response[tuple[IndexEntry, ...]]) -> HttpResponse:
            value = {e.name: {"status": _HEALTH.get(e.state, "FAILED")} for e in response.answer}
            failed = any(e.state == "UNAVAILABLE" for e in response.answer)
            # A server without models, as before the first is loaded, is healthy.
            return json_response(value, 200 if ready.answer or not value else 500 if failed else 503)

        return EngineCall(Request(States()), reply)

    return PreliminaryCall(Request(Ready()), then)


def _models(http: HttpRequest) -> PreliminaryCall[tuple[IndexEntry, ...]]:
    query = _query(http)
    start, limit = (
        _count(query, "next_page_token", 0, messages.MAX_MODELS),
        _count(query, "limit", 1, messages.MAX_LISTED),
    )

    def then(states: Response[tuple[IndexEntry, ...]]) -> EngineCall[tuple[ModelDescription, ...], HttpResponse]:
        at = start or 0
        end = at + (limit or messages.MAX_LISTED)
        value: dict[str, Any] = {"models": [_entry(e) for e in states.answer[at:end]], "object": "list"}
        if end < len(states.answer):
            value["nextPageToken"] = str(end)

        def reply(response: Response[tuple[ModelDescription, ...]]) -> HttpResponse:
            # For clients of OpenAI's API whose base URL lacks /v1: the models of that path, on every page.
            ids = [id_ for id_, *_ in text_model_ids(response.answer)]
            cards = [{"id": id_, "object": "model", "created": 0, "owned_by": "dragoman"} for id_ in ids]
            return json_response({**value, "data": cards})

        return EngineCall(Request(DescribeModels()), reply)

    return PreliminaryCall(Request(States()), then)


def _query(http: HttpRequest) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(http.query).items()}


def _count(query: Mapping[str, str], name: str, minimum: int, maximum: int) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > _MAX_DIGITS or not minimum <= int(text) <= maximum:
        raise InvalidInput(f"`{name}` must be an integer >= {minimum} and <= {maximum}; got '{text[:64]}'")
    return int(text)


def _entry(entry: IndexEntry) -> dict[str, Any]:
    version = {"version": entry.version} if entry.version else {}
    return {"modelName": entry.name, **version, "modelUrl": entry.url or entry.name, "status": entry.state}


def _model(http: HttpRequest) -> EngineCall[tuple[IndexEntry, ...], HttpResponse]:
    name, version = http.params["model"], http.params.get("version", "")

    def reply(response: Response[tuple[IndexEntry, ...]]) -> HttpResponse:
        entries = [e for e in response.answer if e.name == name and version in ("", e.version)]
        if not entries:
            raise ModelNotFound(f"Model or workflow not found: {name[:256]}")
        return json_response([{**_entry(e), "reason": e.reason} for e in entries])

    return EngineCall(Request(States(bearer_token(http.headers))), reply)


def _adapters(http: HttpRequest) -> EngineCall[ModelDescription, HttpResponse]:
    def reply(response: Response[ModelDescription]) -> HttpResponse:
        return json_response({"adapters": [{"name": name} for name in _names(response)]})

    return EngineCall(_describe(http), reply)


def _adapter(http: HttpRequest) -> EngineCall[ModelDescription, HttpResponse]:
    """Describe one adapter, in a list as LMI does."""
    name = http.params["adapter"]

    def reply(response: Response[ModelDescription]) -> HttpResponse:
        if name not in _names(response):
            raise ModelNotFound(f"The adapter was not found: {name[:128]}")
        return json_response([{"name": name}])

    return EngineCall(_describe(http), reply)


def _describe(http: HttpRequest) -> Request[ModelDescription]:
    return Request(Describe(LoadAdapter), http.params.get("model", ""))


def _names(response: Response[ModelDescription]) -> Sequence[str]:
    return response.answer.details.get("adapters") or ()


def _load_adapter(http: HttpRequest, policy: Policy, name: str, done: str) -> PreliminaryCall[None]:
    """Load the adapter of a query; `name` is that of the path, which is replaced if it exists."""
    query = _query(http)
    headers = _ignored_headers(query, ("name", "src", "pin", "preload"), policy)
    replaces, name = bool(name), name or require_text(query, "name")
    call = LoadAdapter(name, require_text(query, "src"), replaces, query.get("pin", "").lower() == "true")
    request = Request(call, http.params.get("model", ""))
    return after_authorization(
        http, EngineCall(request, lambda _: json_response({"status": f"Adapter {name} {done}"}, 200, headers))
    )


def _remove_adapter(http: HttpRequest) -> PreliminaryCall[None]:
    name = http.params["adapter"]
    request = Request(UnloadAdapter(name), http.params.get("model", ""))
    return after_authorization(
        http, EngineCall(request, lambda _: json_response({"status": f"Adapter {name} unregistered"}))
    )


def _register(http: HttpRequest, policy: Policy) -> EngineCall[None, HttpResponse]:
    """Load a model from a `url` or from the repository. SageMaker sends JSON, LMI a query."""
    query = _query(http)
    fields = query if not len(http.body) else {**query, **object_body(http.body, policy)}
    url = fields.get("url") or ""
    name = fields.get("model_name") or (_last(url) if isinstance(url, str) else "")
    if not isinstance(name, str) or not name or not isinstance(url, str):
        raise InvalidInput("`model_name` and `url` must be text, and one of them must say which model to load")
    # A model of the repository is listed with its name as url.
    call = Load(bearer_token(http.headers), "" if url == name else url)
    return _control_call(
        call, name, "", f'Model "{name}" registered.', _ignored_headers(fields, ("model_name", "url"), policy)
    )


def _last(url: str) -> str:
    """Return the default name of a model: the last part of its url."""
    return unquote(url.rstrip("/").rpartition("/")[2])


def _unregister(http: HttpRequest) -> EngineCall[None, HttpResponse]:
    name = http.params["model"]
    message = f'Model "{name}" unregistered'
    return _control_call(Unload(bearer_token(http.headers)), name, http.params.get("version", ""), message)


def _scale(http: HttpRequest, policy: Policy) -> EngineCall[None, HttpResponse]:
    """Set the number of replicas. LMI starts the minimum and adds more under load; here the maximum is started."""
    name, query = http.params["model"], _query(http)
    minimum, maximum = (_count(query, f"{bound}_worker", 0, MAX_REPLICAS) for bound in ("min", "max"))
    count = minimum if maximum is None else maximum
    if not count:
        raise InvalidInput("`max_worker`, or `min_worker`, must be at least 1; to have none, unregister the model")
    if minimum is not None and minimum > count:
        raise InvalidInput(f"`min_worker` must be <= `max_worker`; got {minimum} and {count}")
    message = f'Model "{name}" worker scaled. New Worker configuration min workers:{count} max workers:{count}'
    ignored = _ignored_headers(query, ("min_worker", "max_worker"), policy)
    call = ScaleModel(bearer_token(http.headers), count)
    return _control_call(call, name, http.params.get("version", ""), message, ignored)


def _ignored_headers(fields: Mapping[str, Any], known: tuple[str, ...], policy: Policy) -> Headers:
    """Return the header that names parameters without effect."""
    unknown = [name for name in fields if name not in known]
    reject_unknown(unknown, known, policy)
    return ignored_header(unknown)


def _control_call(
    call: Call[None], name: str, version: str, subject: str, headers: Headers = ()
) -> EngineCall[None, HttpResponse]:
    return EngineCall(Request(call, name, version), lambda _: json_response({"status": subject}, 200, headers))
