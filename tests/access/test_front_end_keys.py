"""Keys with several front ends, which check them and send the limits on models to the engine."""

import asyncio
import sys

import pytest

from access.access_models import BODY, Doubler, KeyFile, Tripler, bearer
from rest.rest_server import RestServer, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several front ends need Linux")


async def test_keys_and_their_models_hold_in_each_front_end(keys: KeyFile) -> None:
    bound = bearer(keys.add("bound", models=["Doubler"]))
    settings = {"front_ends": 2, "api_keys": str(keys.path), "admin_port": 0}
    async with serving(Doubler, Tripler, **settings) as server:
        for _ in range(8):  # connections of both front ends
            assert (await server.infer("Doubler", BODY)).status == 401
            assert (await server.infer("Doubler", BODY, bound)).status == 200
            assert (await server.infer("Tripler", BODY, bound)).status == 403
        assert (await server.request("GET", "/v2/models", headers=bound)).json == {"models": ["Doubler"]}
        rows = b'{"instances": [1.5]}'
        assert (await server.request("POST", "/invocations", rows, bound)).json == {"predictions": [3.0]}
        assert (await server.request("GET", "/metrics", headers=bearer(keys.keys["user"]))).status == 404
        admin = RestServer(int(server.dragoman.admin_url.rpartition(":")[2]), server.dragoman)
        assert (await admin.request("GET", "/metrics", headers=bearer(keys.keys["user"]))).status == 200
        keys.delete("bound")
        async with asyncio.timeout(30):
            while (await server.infer("Doubler", BODY, bound)).status != 401:
                await asyncio.sleep(0.05)
