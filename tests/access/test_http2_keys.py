"""API keys over HTTP/2."""

import httpx2
import pytest

from access.access_models import BODY, KeyFile, bearer
from rest.rest_server import RestServer

INFER = "/v2/models/Doubler/infer"


async def test_a_request_needs_a_key(server: RestServer, keys: KeyFile) -> None:
    pytest.importorskip("h2")
    bound = keys.add("bound", models=["Doubler"])
    server.dragoman.reload()
    async with httpx2.AsyncClient(http1=False, http2=True, base_url=f"http://127.0.0.1:{server.port}") as client:
        denied = await client.post(INFER, content=BODY)
        assert (denied.http_version, denied.status_code) == ("HTTP/2", 401)
        assert denied.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v2/health/live")).status_code == 200
        for _ in range(2):
            found = await client.post(INFER, content=BODY, headers=bearer(keys.keys["user"]))
            assert found.json()["outputs"][0]["data"] == [3.0]
        other = await client.post("/v2/models/Tripler/infer", content=BODY, headers=bearer(bound))
        assert other.status_code == 403
        keys.delete("user")
        server.dragoman.reload()
        assert (await client.post(INFER, content=BODY, headers=bearer(keys.keys["user"]))).status_code == 401
