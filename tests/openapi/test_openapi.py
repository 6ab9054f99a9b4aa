"""The OpenAPI document of a server: what it describes, and that responses agree with it."""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from schemathesis.openapi import from_dict

import dragoman
from access.access_models import Doubler, KeyFile, bearer
from dragoman.assembly import load_protocols
from dragoman.settings import Settings
from openapi.fuzz import described_server
from rest.rest_server import serving

PATH = "/openapi.json"
INFER = "/v2/models/{model}/infer"
INDEX = "/v2/repository/index"


async def read_document(**settings: Any) -> Any:
    async with serving(Doubler, **settings) as server:
        response = await server.request("GET", PATH)
    assert (response.status, response.headers["content-type"]) == (200, "application/json")
    return response.json


async def test_the_document_is_valid_and_describes_each_route() -> None:
    document = await read_document()
    from_dict(document).validate()
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    tables = load_protocols(Settings())[0]
    assert len(tables) > 6
    model = "/v2/models/{model}"
    own = {("GET", f"{base}{PATH}") for base in ("", model, f"{model}/versions/{{version}}")}
    routes = [route for table in tables for route in table.routes]
    assert [route.pattern for route in routes if route.operation is None] == []
    assert described == {(r.method, r.operation.path or r.pattern) for r in routes if r.operation is not None} | own
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(names)


async def test_an_operation_has_parameters_bodies_and_every_status() -> None:
    document = await read_document()
    operation = document["paths"][INFER]["post"]
    assert [(p["name"], p["in"]) for p in operation["parameters"]] == [
        ("model", "path"),
        ("Inference-Header-Content-Length", "header"),
    ]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"] == (
        "#/components/schemas/InferRequest"
    )
    assert set(operation["responses"]) == {
        *("200", "400", "401", "403", "404", "408", "413", "415", "429", "431", "500", "503", "504")
    }
    error = operation["responses"]["404"]["content"]["application/json"]["schema"]
    assert document["components"]["schemas"][error["$ref"].rpartition("/")[2]]["required"] == ["error"]
    tensor = document["components"]["schemas"]["InferTensor"]
    assert tensor["required"] == ["name", "shape", "datatype"]
    assert "FP32" in tensor["properties"]["datatype"]["enum"]


async def test_responses_of_other_vendors_are_described_by_their_documentation() -> None:
    document = await read_document()
    paths = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/generate", "/invocations")
    for path in paths:
        operation = document["paths"][path]["post"]
        assert operation["externalDocs"]["url"].startswith("https://")
        assert (
            operation["requestBody"]["content"]["application/json"]["schema"].keys() >= {"properties"}
            or path == paths[-1]
        )
        assert "$ref" not in json.dumps(operation)
    assert "externalDocs" not in document["paths"][INFER]["post"]


async def test_credentials_are_declared_where_they_are_needed(keys: KeyFile) -> None:
    open_document = await read_document()
    assert "securitySchemes" not in open_document["components"]
    controlled = await read_document(control_token="t")
    assert "security" not in controlled["paths"][INFER]["post"]
    assert controlled["paths"][INDEX]["post"]["security"] == [{"bearer": []}, {"apiKey": []}]
    async with serving(Doubler, api_keys=str(keys.path)) as server:
        assert (await server.request("GET", PATH)).status == 401
        document = (await server.request("GET", PATH, None, bearer(keys.keys["user"]))).json
    assert {path for path, item in document["paths"].items() for each in item.values() if "security" not in each} == {
        *("/", "/health", "/ping", "/models/{model}/health", "/v2/health/live", "/v2/health/ready"),
        *("/v2/models/{model}/ready", "/v2/models/{model}/versions/{version}/ready"),
    }
    assert document["components"]["securitySchemes"]["bearer"] == {"type": "http", "scheme": "bearer"}


async def test_the_document_names_no_models() -> None:
    assert "Doubler" not in json.dumps(await read_document())


async def test_settings_change_the_document() -> None:
    document = await read_document(root_path="/models", metrics_path="/m", health_json=True)
    assert document["servers"] == [{"url": "/models"}]
    assert "/m" in document["paths"]
    live = document["paths"]["/v2/health/live"]["get"]["responses"]
    assert live["200"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Liveness"}


async def test_each_port_describes_its_own_routes() -> None:
    async with serving(Doubler, admin_port=0) as server:
        public = (await server.request("GET", PATH)).json["paths"]
        async with httpx2.AsyncClient(base_url=server.dragoman.admin_url) as client:
            admin = (await client.get(PATH)).json()["paths"]
    assert INFER in public
    assert INDEX not in public
    assert INFER not in admin
    assert INDEX in admin


async def test_asgi_applications_have_it_too() -> None:
    app = dragoman.asgi(Doubler)
    async with app, httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client:
        assert INFER in (await client.get(PATH)).json()["paths"]


@pytest.mark.parametrize("id_", [0, False, [], {}])
async def test_an_id_of_another_type_is_rejected(id_: Any) -> None:
    async with serving(Doubler) as server:
        body = {"text_input": "hi", "id": id_}
        response = await server.request("POST", "/v2/models/Doubler/generate", body)
    assert (response.status, "'id'" in response.error) == (400, True)


async def test_responses_agree_with_the_document() -> None:
    """A short run of `./scripts/fuzz`."""
    paths = ("/v2/models", INFER, INDEX)
    chosen = [argument for path in paths for argument in ("--include-path", path)]
    with described_server() as run:
        done = await asyncio.to_thread(
            run, "--max-examples", "10", "--seed", "1", "--no-shrink", *chosen, capture_output=True
        )
    assert done.returncode == 0, done.stdout
    assert "Tested: 3" in done.stdout, done.stdout
