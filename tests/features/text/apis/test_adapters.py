"""Routes of LoRA adapters: load and unload them as with vLLM and LMI, and use their names as those of models."""

from pathlib import Path
from typing import Any

import pytest

from access.access_models import KeyFile, bearer
from dragoman.core.errors import AlreadyLoaded, InvalidInput, PathNotFound
from dragoman.core.text_engine_calls import LoadAdapter, UnloadAdapter
from text_server import ReverseModel, TextServer, serve

TOKEN = {"authorization": "Bearer open"}
PATHS = ("/v1", "/models/Adaptable/v1")


class Adaptable(ReverseModel):
    """Records the adapters that are loaded."""

    def load(self) -> None:
        super().load()
        self.adapters: dict[str, LoadAdapter] = {}
        self.names: list[str] = []

    def details(self) -> dict[str, Any]:
        return {**super().details(), "adapters": self.names}

    async def load_adapter(self, call: LoadAdapter) -> None:
        if call.path == "broken":
            raise InvalidInput(f"adapter '{call.name}' cannot be read")
        if call.path == "missing":
            raise PathNotFound("folder not found")
        if call.name in self.adapters and not call.replaces:
            raise AlreadyLoaded(f"the adapter '{call.name}' is already loaded")
        self.adapters[call.name] = call
        self.names[:] = sorted(self.adapters)

    async def unload_adapter(self, call: UnloadAdapter) -> None:
        if self.adapters.pop(call.name, None) is None:
            raise PathNotFound(f"the adapter '{call.name}' is not loaded")
        self.names[:] = sorted(self.adapters)


async def change(server: TextServer, path: str, body: Any) -> tuple[int, bytes]:
    response = await server.post(path, body, headers=TOKEN)
    return response.status, response.body


@pytest.mark.parametrize("base", PATHS)
async def test_routes_of_vllm(base: str) -> None:
    async with serve(Adaptable, control_token="open") as server:
        load, unload = f"{base}/load_lora_adapter", f"{base}/unload_lora_adapter"
        body: dict[str, Any] = {"lora_name": "sql", "lora_path": "sql-v1"}
        assert await change(server, load, body) == (200, b"Success: LoRA adapter 'sql' added successfully.")
        assert server.model("Adaptable").adapters == {"sql": LoadAdapter("sql", "sql-v1")}
        cards = (await server.request("GET", "/v1/models")).json["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("Adaptable", None),
            ("sql", "Adaptable"),
            ("Adaptable:sql", "Adaptable"),
        ]
        assert (await change(server, load, body))[0] == 400
        assert (await change(server, load, {**body, "load_inplace": True, "pinned": True}))[0] == 200
        assert server.model("Adaptable").adapters["sql"] == LoadAdapter("sql", "sql-v1", True, True)
        for model in ("sql", "Adaptable:sql"):
            for more in ({}, {"stream": True}):
                response = await server.post("/v1/completions", {"model": model, "prompt": "a b", **more})
                assert response.status == 200
                assert server.model("Adaptable").calls[-1].sampling.adapter == "sql"
        counting = {"model": "sql", "messages": [{"role": "user", "content": "a b"}]}
        assert (await server.post("/v1/messages/count_tokens", counting)).json == {"input_tokens": 3}
        assert await change(server, unload, {"lora_name": "sql", "lora_int_id": 1}) == (
            200,
            b"Success: LoRA adapter 'sql' removed successfully.",
        )
        response = await server.post("/v1/completions", {"model": "sql", "prompt": "a b"})
        assert (response.status, response.json["error"]["code"]) == (404, "model_not_found")


async def test_errors_of_vllms_routes() -> None:
    async with serve(Adaptable, control_token="open") as server:
        for path, body, status, message in (
            ("load", {"lora_path": "a"}, 400, "`lora_name` must be a non-empty string; got null"),
            ("load", {"lora_name": "a", "lora_path": ""}, 400, "`lora_path` must be a non-empty string"),
            ("load", {"lora_name": "a", "lora_path": 1}, 400, "`lora_path` must be a string"),
            ("load", {"lora_name": "a", "lora_path": "broken"}, 400, "adapter 'a' cannot be read"),
            ("load", {"lora_name": "a", "lora_path": "missing"}, 404, "folder not found"),
            ("load", {"lora_name": "a", "lora_path": "b", "model": "other"}, 404, "other"),
            ("unload", {"lora_name": "a"}, 404, "the adapter 'a' is not loaded"),
        ):
            response = await server.post(f"/v1/{path}_lora_adapter", body, headers=TOKEN)
            assert response.status == status, response.body
            assert message in response.json["error"]["message"]
        body = {"lora_name": "a", "lora_path": "b"}
        assert (await server.post("/v1/load_lora_adapter", body)).status == 401
        assert (await server.post("/v1/unload_lora_adapter", body)).status == 401
        assert server.model("Adaptable").adapters == {}


async def test_a_key_of_one_model_changes_the_adapters_of_that_model(tmp_path: Path) -> None:
    class Second(Adaptable):
        pass

    keys = KeyFile(tmp_path / "keys.toml")
    headers = bearer(keys.add("bound", ["admin"], ["Adaptable"]))
    async with serve(Adaptable, Second, api_keys=str(keys.path)) as server:
        for model, status in (("Adaptable", 200), ("Second", 403)):
            body = {"lora_name": "sql", "lora_path": "a", "model": model}
            paths = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", f"/models/{model}/adapters?name=sql&src=a"
            found = [(await server.post(path, body, headers=headers)).status for path in paths]
            assert found == [status] * 3
        assert list(server.model("Adaptable").adapters) == ["sql"]
        assert server.model("Second").adapters == {}


async def test_models_without_adapters_reject_them() -> None:
    async with serve(control_token="open") as server:
        body = {"lora_name": "a", "lora_path": "b", "model": "ReverseModel"}
        assert (await server.post("/v1/load_lora_adapter", body, headers=TOKEN)).status == 400


async def test_an_adapter_of_several_models_is_not_a_model() -> None:
    class Second(Adaptable):
        pass

    async with serve(Adaptable, Second, control_token="open") as server:
        for model in ("Adaptable", "Second"):
            body = {"lora_name": "sql", "lora_path": "a"}
            assert (await change(server, f"/models/{model}/v1/load_lora_adapter", body))[0] == 200
        response = await server.post("/v1/completions", {"model": "sql", "prompt": "a"})
        assert response.status == 404
        response = await server.post("/v1/completions", {"model": "Second:sql", "prompt": "a"})
        assert (response.status, response.json["model"]) == (200, "Second")


@pytest.mark.parametrize("base", ["/adapters", "/models/Adaptable/adapters"])
async def test_routes_of_lmi(base: str) -> None:
    async with serve(Adaptable, control_token="open") as server:

        async def send(method: str, path: str) -> tuple[int, Any]:
            response = await server.request(method, f"{base}{path}", headers=TOKEN)
            return response.status, response.json

        assert await send("POST", "?name=a1&src=one&pin=true&preload=true") == (
            200,
            {"status": "Adapter a1 registered"},
        )
        assert server.model("Adaptable").adapters["a1"] == LoadAdapter("a1", "one", False, True)
        assert (await send("POST", "?name=a1&src=two"))[0] == 409
        assert await send("POST", "/a1/update?src=two") == (200, {"status": "Adapter a1 updated"})
        assert server.model("Adaptable").adapters["a1"] == LoadAdapter("a1", "two", True, False)
        assert await send("GET", "") == (200, {"adapters": [{"name": "a1"}]})
        assert await send("GET", "/a1") == (200, [{"name": "a1"}])
        assert (await send("GET", "/a2"))[0] == 404
        assert (await send("POST", "?src=two"))[0] == 424
        assert await send("DELETE", "/a1") == (200, {"status": "Adapter a1 unregistered"})
        assert (await send("DELETE", "/a1"))[0] == 404
        assert (await server.request("DELETE", f"{base}/a1")).status == 401


async def test_lmi_takes_an_adapter_for_each_input() -> None:
    async with serve(Adaptable, control_token="open") as server:
        body: dict[str, Any] = {"inputs": ["a b", "c d"], "adapters": ["one", ""]}
        assert (await server.post("/invocations", body)).status == 200
        sampling = server.model("Adaptable").calls[-1].sampling
        assert (sampling.adapter, sampling.adapters) == ("", ("one", ""))
        assert (await server.post("/invocations", {"inputs": "a b", "adapters": ["one"]})).status == 200
        sampling = server.model("Adaptable").calls[-1].sampling
        assert (sampling.adapter, sampling.adapters) == ("one", ())
