"""vLLM's `/load`: the number of text generation calls in flight."""

import asyncio

import dragoman
from text_server import ReverseModel, TextServer, serve


async def fetch_load(server: TextServer) -> int:
    response = await server.request("GET", "/load")
    assert response.status == 200
    assert response.json.keys() == {"server_load"}
    load: int = response.json["server_load"]
    return load


class Slow(dragoman.Model):
    """Not a text model; its calls are not counted."""

    placement = "inline"
    busy = False

    async def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        type(self).busy = True
        await asyncio.Event().wait()
        raise AssertionError("not reached")


async def test_text_calls_are_counted_while_in_flight() -> None:
    async with serve() as server:
        assert await fetch_load(server) == 0
        completion = asyncio.ensure_future(server.post("/v1/completions", {"prompt": "a !wait"}))
        _, streamed = await server.send("POST", "/v1/completions", {"prompt": "a !wait", "stream": True})
        _, disconnected = await server.send("POST", "/invocations", {"inputs": "a !wait"})
        while server.model().active < 3:
            await asyncio.sleep(0)
        assert await fetch_load(server) == 3
        disconnected.close()
        while await fetch_load(server) > 2:
            await asyncio.sleep(0)
        assert server.model().active == 2
        server.model().gate.set()
        assert (await completion).status == 200
        while await fetch_load(server):
            await asyncio.sleep(0)
        assert not server.model().active
        streamed.close()


async def test_calls_of_other_models_are_not_counted() -> None:
    async with serve(ReverseModel, Slow) as server:
        body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1]}]}
        _, writer = await server.send("POST", "/v2/models/Slow/infer", body)
        while not Slow.busy:
            await asyncio.sleep(0)
        assert await fetch_load(server) == 0
        writer.close()
