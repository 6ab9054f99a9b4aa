"""The OpenAPI document of a model, and the pages that show documents."""

import gzip
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import numpy as np
import pytest
from schemathesis.openapi import from_dict

import dragoman
from access.access_models import Doubler, KeyFile, bearer
from rest.rest_server import RestServer, serving

ROOT = Path(__file__).parents[2]
MODEL, VERSION = "/v2/models/Mixed", "/v2/models/Versioned/versions/2"


class Mixed(dragoman.Model):
    """Inputs of several datatypes and shapes; the last is optional."""

    placement = "inline"
    inputs = (
        dragoman.TensorSpec("table", dragoman.FP32, (-1, 3), accepts=frozenset({dragoman.FP64})),
        dragoman.TensorSpec("count", dragoman.UINT8, (1,)),
        dragoman.TensorSpec("words", dragoman.BYTES, (-1,)),
        dragoman.TensorSpec("flag", dragoman.BOOL, (), optional=True),
    )
    outputs = (dragoman.TensorSpec("sum", dragoman.FP64, (-1,)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"sum": np.asarray(call.inputs["table"].data, np.float64).sum(axis=1)}


class Wide(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (3, 224, 224)),)

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {"y": call.inputs["x"]}


class Undeclared(dragoman.Model):
    placement = "inline"

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return dict(call.inputs)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RestServer]:
    folder = tmp_path / "Versioned"
    folder.mkdir()
    (folder / "model.py").write_text("from openapi.test_openapi_models import Mixed\n")
    (folder / "dragoman.toml").write_text("""[model]
uri = "model.py:Mixed"
version = "2"
placement = "inline"
""")
    async with serving(Mixed, Wide, Undeclared, folder) as running:
        yield running


async def read_document(server: RestServer, model: str) -> Any:
    response = await server.request("GET", f"/v2/models/{model}/openapi.json")
    assert (response.status, response.headers["content-type"]) == (200, "application/json")
    from_dict(response.json).validate()
    return response.json


def message(document: Any, name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document})


async def test_the_example_of_a_model_runs_and_both_messages_agree_with_its_document(server: RestServer) -> None:
    document = await read_document(server, "Mixed")
    operation = document["paths"][f"{MODEL}/infer"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    assert {each["name"]: (each["shape"], each["datatype"]) for each in example["inputs"]} == {
        "table": ([1, 3], "FP32"),
        "count": ([1], "UINT8"),
        "words": ([1], "BYTES"),
    }
    message(document, "ModelInferRequest").validate(example)
    response = await server.request("POST", f"{MODEL}/infer", example)
    assert (response.status, response.json["outputs"][0]["data"]) == (200, [3.0])
    message(document, "ModelInferResponse").validate(response.json)


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"name": "other"}),
        (0, {"shape": [1, 4]}),
        (0, {"shape": [3]}),
        (0, {"datatype": "INT64"}),
        (1, {"data": [256]}),
        (1, {"data": [-1]}),
        (1, {"data": ["1"]}),
        (2, {"data": [1]}),
    ],
)
async def test_the_document_excludes_requests_that_the_server_rejects(
    server: RestServer, index: int, change: dict[str, Any]
) -> None:
    document = await read_document(server, "Mixed")
    body = document["paths"][f"{MODEL}/infer"]["post"]["requestBody"]["content"]["application/json"]["example"]
    body["inputs"][index] |= change
    assert not message(document, "ModelInferRequest").is_valid(body)
    assert (await server.request("POST", f"{MODEL}/infer", body)).status == 400


@pytest.mark.parametrize("change", [{"datatype": "FP64"}, {"data": [[1, None, 3]]}, {"shape": [2, 3], "data": [1] * 6}])
async def test_the_document_has_requests_that_the_server_accepts(server: RestServer, change: dict[str, Any]) -> None:
    document = await read_document(server, "Mixed")
    body = document["paths"][f"{MODEL}/infer"]["post"]["requestBody"]["content"]["application/json"]["example"]
    body["inputs"][0] |= change
    message(document, "ModelInferRequest").validate(body)
    assert (await server.request("POST", f"{MODEL}/infer", body)).status == 200


async def test_a_document_has_the_paths_of_its_model_that_the_model_supports(server: RestServer) -> None:
    document = await read_document(server, "Mixed")
    assert document["info"] == {"title": "Mixed", "version": "1", "description": document["info"]["description"]}
    paths = ("", "/infer", "/ready", "/config", "/stats", "/trace/setting", "/openapi.json")
    assert {f"{MODEL}{path}" for path in paths} == set(document["paths"])
    versioned = (await server.request("GET", f"{VERSION}/openapi.json")).json
    assert versioned["info"]["version"] == "2"
    assert f"{VERSION}/infer" in versioned["paths"]
    assert all(path.startswith(VERSION) for path in versioned["paths"])


async def test_long_examples_and_undeclared_datatypes_are_left_out(server: RestServer) -> None:
    for model in ("Wide", "Undeclared"):
        document = await read_document(server, model)
        content = document["paths"][f"/v2/models/{model}/infer"]["post"]["requestBody"]["content"]["application/json"]
        assert "example" not in content
    tensor = {"name": "anything", "shape": [1], "datatype": "INT8", "data": [1]}
    message(document, "ModelInferRequest").validate({"inputs": [tensor]})


async def test_an_unknown_model_has_no_document(server: RestServer) -> None:
    for path in ("/openapi.json", "/docs/dataplane.json"):
        response = await server.request("GET", f"/v2/models/nope{path}")
        assert (response.status, "nope" in response.error) == (404, True)


@pytest.mark.parametrize(
    ("page", "document"),
    [
        ("/docs", "/openapi.json"),
        ("/v2/docs", "/v2/docs/dataplane.json"),
        (f"{MODEL}/docs", f"{MODEL}/docs/dataplane.json"),
        (f"{VERSION}/docs", f"{VERSION}/docs/dataplane.json"),
    ],
)
async def test_pages_load_files_and_documents_that_exist(server: RestServer, page: str, document: str) -> None:
    response = await server.request("GET", page)
    assert (response.status, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script-src 'self'" in response.headers["content-security-policy"]
    text = response.body.decode()
    base = httpx2.URL(f"http://server{page}")
    linked = [base.join(link).path for link in re.findall(r'(?:src|href|data-document)="([^"{:]+)"', text)]
    assert document in linked
    assert len(linked) == 8  # two scripts, two style sheets, the document twice, the console and its icon
    for path in linked:
        assert (await server.request("GET", path)).status == 200, path
    assert not re.search(r"https?://", text)
    redirect = await server.request("GET", f"{page}/")
    assert redirect.status == 308
    assert httpx2.URL(f"http://server{page}/").join(redirect.headers["location"]).path == page


async def test_files_of_the_page_are_compressed_and_cached(server: RestServer) -> None:
    path = "/docs/assets/swagger-ui-bundle.js"
    plain = await server.request("GET", path)
    compressed = await server.request("GET", path, None, {"accept-encoding": "gzip"})
    assert compressed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(compressed.body) == plain.body
    again = await server.request("GET", path, None, {"if-none-match": plain.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    missing = await server.request("GET", "/docs/assets/page.html")
    assert (missing.status, "page.html" in missing.error) == (404, True)


async def test_pages_are_public_and_documents_need_a_key(keys: KeyFile) -> None:
    async with serving(Doubler, api_keys=str(keys.path)) as server:
        for page in ("/docs", "/v2/models/Doubler/docs", "/docs/assets/page.js"):
            assert (await server.request("GET", page)).status == 200
        for path in ("/openapi.json", "/v2/models/Doubler/docs/dataplane.json"):
            assert (await server.request("GET", path)).status == 401
            assert (await server.request("GET", path, None, bearer(keys.keys["user"]))).status == 200


async def test_without_the_page_only_documents_are_served() -> None:
    async with serving(Doubler, web_pages=False) as server:
        statuses = [(await server.request("GET", p)).status for p in ("/docs", "/v2/docs", "/docs/assets/page.js")]
        assert statuses == [404, 404, 404]
        assert (await server.request("GET", "/openapi.json")).status == 200


def test_vendored_files_are_those_of_their_packages() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "vendor"), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
