"""vLLM's routes to load and unload LoRA adapters at run time."""

from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core.sampling import flag, text
from dragoman.core.text_engine_calls import LoadAdapter, UnloadAdapter
from dragoman.protocols.parameters import (
    Parameter,
    after_authorization,
    anything,
    build_request,
    object_body,
    option,
    parse_parameters,
    require_text,
)
from dragoman.protocols.wire import (
    JSON,
    PLAIN_TEXT,
    EngineCall,
    HttpRequest,
    HttpResponse,
    Operation,
    Policy,
    PreliminaryCall,
    Route,
)

_MODEL: Mapping[str, Parameter] = {"model": option("model", text()), "lora_name": option("lora_name", text())}
_LOAD: Mapping[str, Parameter] = {
    **_MODEL,
    "lora_path": option("lora_path", text()),
    "load_inplace": option("load_inplace", flag()),
    "pinned": option("pinned", flag()),
}
_UNLOAD: Mapping[str, Parameter] = {**_MODEL, "lora_int_id": option("lora_int_id", anything())}


class AdapterToLoad(msgspec.Struct):
    """An adapter: its name, and its folder in the model's folder of adapters."""

    lora_name: str
    lora_path: str
    model: str | None = None
    load_inplace: bool | None = None
    pinned: bool | None = None


class AdapterToUnload(msgspec.Struct):
    lora_name: str
    model: str | None = None
    lora_int_id: Any = None


def routes(policy: Policy) -> list[Route]:
    """Return the routes."""

    def load(http: HttpRequest) -> PreliminaryCall[None]:
        options, headers = _options(http, _LOAD, policy)
        name, path = require_text(options, "lora_name"), require_text(options, "lora_path")
        replaces, is_pinned = options.get("load_inplace", False), options.get("pinned", False)
        request = build_request(LoadAdapter(name, path, replaces, is_pinned), http, policy, options.get("model", ""))
        return after_authorization(http, EngineCall(request, lambda _: _success(name, "added", headers)))

    def unload(http: HttpRequest) -> PreliminaryCall[None]:
        options, headers = _options(http, _UNLOAD, policy)
        name = require_text(options, "lora_name")
        request = build_request(UnloadAdapter(name), http, policy, options.get("model", ""))
        return after_authorization(http, EngineCall(request, lambda _: _success(name, "removed", headers)))

    success = {200: {"text/plain": None}}
    loading = Operation("Load a LoRA adapter", success, {JSON: AdapterToLoad})
    unloading = Operation("Unload a LoRA adapter", success, {JSON: AdapterToUnload})
    return [
        Route("POST", f"{base}/{verb}_lora_adapter", endpoint, role="admin", operation=operation)
        for base in ("/v1", "/models/{model}/v1")
        for verb, endpoint, operation in (("load", load, loading), ("unload", unload, unloading))
    ]


def _options(http: HttpRequest, table: Mapping[str, Parameter], policy: Policy) -> tuple[dict[str, Any], Any]:
    parsed = parse_parameters(object_body(http.body, policy), table, policy)
    return parsed.options, (("content-type", PLAIN_TEXT), *parsed.headers)


def _success(name: str, what: str, headers: Any) -> HttpResponse:
    return HttpResponse(200, (f"Success: LoRA adapter '{name}' {what} successfully.".encode(),), headers)
