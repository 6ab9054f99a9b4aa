"""Routes that reset the prefix cache of a model."""

from pathlib import Path

import pytest

from access.access_models import KeyFile, bearer
from dragoman.core.text_engine_calls import ResetPrefixCache
from text_server import ReverseModel, serve

TOKEN = {"authorization": "Bearer open"}
TEXTS = {"reset_prefix_cache": b"", "flush_cache": b"Cache flushed.\n"}


class Caching(ReverseModel):
    """Counts the resets."""

    def load(self) -> None:
        super().load()
        self.resets = 0

    def reset_prefix_cache(self, call: ResetPrefixCache) -> None:
        self.resets += 1


@pytest.mark.parametrize("name", TEXTS)
async def test_routes_of_vllm_and_sglang(name: str) -> None:
    async with serve(Caching, control_token="open") as server:
        for resets, path in enumerate((f"/{name}", f"/models/Caching/{name}"), 1):
            response = await server.post(path, b"", headers=TOKEN)
            assert (response.status, response.body) == (200, TEXTS[name])
            assert response.headers["content-type"] == "text/plain; charset=utf-8"
            assert "x-ignored-parameters" not in response.headers
            assert server.model("Caching").resets == resets
        response = await server.post(f"/{name}?reset_running_requests=true&reset_external=", b"", headers=TOKEN)
        assert response.status == 200
        assert response.headers["x-ignored-parameters"] == "reset_running_requests, reset_external"
        assert (await server.post(f"/{name}", b"")).status == 401
        assert (await server.post(f"/models/missing/{name}", b"", headers=TOKEN)).status == 404
        assert server.model("Caching").resets == 3


async def test_without_a_control_token_nothing_is_reset() -> None:
    async with serve(Caching) as server:
        response = await server.post("/reset_prefix_cache", b"")
        assert (response.status, server.model("Caching").resets) == (403, 0)


async def test_strict_parameters() -> None:
    async with serve(Caching, control_token="open", strict_parameters=True) as server:
        response = await server.post("/reset_prefix_cache?reset_external=true", b"", headers=TOKEN)
        assert (response.status, server.model("Caching").resets) == (400, 0)
        assert "unknown parameters: `reset_external`" in response.json["error"]["message"]


async def test_the_model_and_its_key(tmp_path: Path) -> None:
    class Second(Caching):
        pass

    keys = KeyFile(tmp_path / "keys.toml")
    bound, reader = bearer(keys.add("bound", ["admin"], ["Caching"])), bearer(keys.add("reader", ["infer", "read"]))
    async with serve(Caching, Second, ReverseModel, api_keys=str(keys.path)) as server:
        found = [
            (await server.post(path, b"", headers=headers)).status
            for path, headers in (
                ("/models/Caching/reset_prefix_cache", bound),
                ("/models/Second/reset_prefix_cache", bound),
                ("/models/Caching/reset_prefix_cache", reader),
                ("/models/Caching/flush_cache", reader),
            )
        ]
        assert found == [200, 403, 403, 403]
        assert (server.model("Caching").resets, server.model("Second").resets) == (1, 0)


async def test_models_without_a_prefix_cache() -> None:
    async with serve(control_token="open") as server:
        response = await server.post("/models/ReverseModel/reset_prefix_cache", b"", headers=TOKEN)
        assert (response.status, response.json["error"]["type"]) == (400, "invalid_request_error")
