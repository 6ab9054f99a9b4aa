"""Pages of other sites, paths behind a proxy, and a server that starts without its models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from e2e.server_process import ServerProcess, running_server

MODEL = """
import dragoman


@dragoman.model
def half(x: float) -> float:
    return x / 2
"""
BODY = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [3.0]}]}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type, x-user"}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("browsers")
    (folder / "model.py").write_text(MODEL)
    flags = ["--cors-origins", "https://a.org,https://b.org", "--cors-origin-regex", r"https://.*\.c\.org"]
    flags += ["--cors-expose", "x-mine", "--root-path", "/behind/it", "--cors-credentials"]
    with running_server(str(folder / "model.py:half"), "--placement", "thread", *flags) as server:
        yield server


@pytest.mark.parametrize("origin", ["https://a.org", "https://x.c.org"])
@pytest.mark.parametrize("path", ["/v2/models/half/infer", "/behind/it/v2/models/half/infer"])
def test_cors_allows_pages_of_a_listed_origin(process: ServerProcess, origin: str, path: str) -> None:
    url = f"http://{process.url}{path}"
    preflight = requests.options(url, headers={"origin": origin, **PREFLIGHT}, timeout=60)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == origin
    assert preflight.headers["access-control-allow-methods"] == "POST"  # the one that is asked for
    assert preflight.headers["access-control-allow-headers"] == "content-type, x-user"
    response = requests.post(url, json=BODY, headers={"origin": origin}, timeout=60)
    assert response.json()["outputs"][0]["data"] == [1.5]
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["access-control-allow-credentials"] == "true"
    assert response.headers["access-control-expose-headers"] == "x-mine"
    assert "origin" in response.headers["vary"]


def test_cors_preflight_of_a_custom_handler(process: ServerProcess) -> None:
    url = f"http://{process.url}/a/path/of/its/own"
    preflight = requests.options(url, headers={"origin": "https://a.org", **PREFLIGHT}, timeout=60)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://a.org"


def test_cors_headers_on_errors(process: ServerProcess) -> None:
    url = f"http://{process.url}/v2/models/half/infer"
    response = requests.post(url, json={}, headers={"origin": "https://b.org"}, timeout=60)
    assert response.status_code == 400
    assert response.headers["access-control-allow-origin"] == "https://b.org"


@pytest.mark.parametrize("origin", ["https://evil.org", "https://a.org.evil.org", "null", "https://xc.org"])
def test_cors_rejects_pages_of_other_origins(process: ServerProcess, origin: str) -> None:
    url = f"http://{process.url}/v2/models/half/infer"
    assert requests.options(url, headers={"origin": origin, **PREFLIGHT}, timeout=60).status_code == 403
    response = requests.post(url, json=BODY, headers={"origin": origin}, timeout=60)
    assert "access-control-allow-origin" not in response.headers


def test_no_cors_headers_by_default(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(str(tmp_path / "model.py:half"), "--placement", "thread") as server:
        response = requests.get(f"http://{server.url}/v2", headers={"origin": "https://a.org"}, timeout=60)
        assert not [h for h in response.headers if h.lower().startswith("access-control")]
        assert requests.get(f"http://{server.url}/behind/it/v2", timeout=60).status_code == 404


def test_cors_lets_a_page_read_what_it_needs_by_default(tmp_path: Path) -> None:
    """A page cannot take a binary response apart without the length of its JSON, nor see the id of its request."""
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(str(tmp_path / "model.py:half"), "--placement", "thread", "--cors-origins", "*") as server:
        page = {"origin": "https://a.org"}
        body = {**BODY, "parameters": {"binary_data_output": True}}
        response = requests.post(f"http://{server.url}/v2/models/half/infer", json=body, headers=page, timeout=60)
        exposed = {name.strip().lower() for name in response.headers["access-control-expose-headers"].split(",")}
        assert {"inference-header-content-length", "x-request-id"} <= exposed & {*map(str.lower, response.headers)}
        assert {"request-id", "x-ignored-parameters", "retry-after"} <= exposed
        for method in ("GET", "POST", "DELETE", "PUT"):
            asked = {**page, "access-control-request-method": method}
            preflight = requests.options(f"http://{server.url}/v1/responses/x", headers=asked, timeout=60)
            assert preflight.status_code == 204
            assert method in preflight.headers["access-control-allow-methods"].split(", ")
