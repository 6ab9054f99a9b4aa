"""The role that each route and method needs."""

from dragoman.assembly import load_protocols
from dragoman.settings import Settings

ROLES = {
    "read": {
        "/InputSizes", "/Info", "/ModelInfo", "/OutputSizes", "/info", "/load", "/metrics", "/models",
        "/models/{model}", "/adapters", "/adapters/{adapter}", "/models/{model}/adapters",
        "/models/{model}/adapters/{adapter}", "/models/{model}/info", "/models/{model}/{version}",
        "/server/metrics", "/v1/models", "/v1/models/{name}", "/v1/usage", "/v2", "/v2/models", "/v2/models/{model}",
        "/v2/models/stats", "/v2/models/{model}/config", "/v2/models/{model}/stats",
        "/v2/models/{model}/versions/{version}", "/v2/models/{model}/versions/{version}/config",
        "/v2/models/{model}/versions/{version}/stats", "/v2/repository/status", "/version",
        "/api/ps", "/api/pull", "/api/show", "/api/tags", "/api/version",
    },
    "admin": {
        "/models", "/models/{model}", "/models/{model}/{version}", "/v2/repository/index",
        "/v2/repository/models/{model}/load", "/v2/repository/models/{model}/unload",
        *(
            f"{base}{path}"
            for base in ("", "/models/{model}")
            for path in (
                "/adapters", "/adapters/{adapter}", "/adapters/{adapter}/update", "/v1/load_lora_adapter",
                "/v1/unload_lora_adapter", "/reset_prefix_cache", "/flush_cache",
            )
        ),
        "/v2/logging", "/v2/trace/setting", "/v2/models/{model}/trace/setting",
        *(
            f"/v2/{kind}sharedmemory/{part}{verb}"
            for kind in ("system", "cuda")
            for part, verbs in (("", "status unregister"), ("region/{region}/", "status register unregister"))
            for verb in verbs.split()
        ),
    },
}  # fmt: skip


def test_each_route_needs_the_role_that_it_should() -> None:
    """A route that names no role needs admin; every other one runs a model."""
    http, grpc = load_protocols(Settings(umbridge_shared_memory=True))
    routes = [route for protocol in http for route in protocol.routes if not route.health]
    for role, patterns in ROLES.items():
        assert {route.pattern for route in routes if route.role == role} == patterns
    reading = [route for route in routes if route.role == "infer"]
    stored = {"/v1/responses/{id}", "/v1/responses/{id}/input_items"}  # of the caller's own key
    own = ("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/conversations")
    others = [route for route in reading if route.pattern not in stored and route.session is None]
    models = [route for route in others if not route.pattern.startswith(own)]
    assert {route.method for route in models} == {"POST"}
    control = ("repository", "load", "unload", "register", "index")
    assert not [route for route in reading if any(word in route.pattern.lower() for word in control)]
    methods = {method.name: method.role for protocol in grpc for method in protocol.methods}
    assert {name for name, role in methods.items() if role == "infer"} == {"ModelInfer", "ModelStreamInfer"}
    reading_methods = {name for name, role in methods.items() if role == "read"}
    assert reading_methods == {"ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics"}
