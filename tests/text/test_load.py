"""vLLM's `/load`: how many calls of texts are in flight."""

import asyncio

import dragoman

from .text_house import House, Speaker, speaking


async def load(house: House) -> int:
    answer = await house.ask("GET", "/load")
    assert answer.status == 200
    assert answer.json.keys() == {"server_load"}
    found: int = answer.json["server_load"]
    return found


class Slow(dragoman.Model):
    """No model of texts."""

    placement = "inline"
    busy = False

    async def infer(self, call: dragoman.Infer) -> dragoman.Inference:
        type(self).busy = True
        await asyncio.Event().wait()
        raise AssertionError("nobody lets it go on")


async def test_calls_count_from_their_arrival_to_their_end() -> None:
    async with speaking() as house:
        assert await load(house) == 0
        whole = asyncio.ensure_future(house.post("/v1/completions", {"prompt": "a !wait"}))
        _, streamed = await house.send("POST", "/v1/completions", {"prompt": "a !wait", "stream": True})
        _, left = await house.send("POST", "/invocations", {"inputs": "a !wait"})
        while house.model().active < 3:
            await asyncio.sleep(0)
        assert await load(house) == 3
        left.close()
        while await load(house) > 2:
            await asyncio.sleep(0)
        assert house.model().active == 2
        house.model().gate.set()
        assert (await whole).status == 200
        while await load(house):
            await asyncio.sleep(0)
        assert not house.model().active
        streamed.close()


async def test_calls_of_other_models_do_not() -> None:
    async with speaking(Speaker, Slow) as house:
        body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1]}]}
        _, writer = await house.send("POST", "/v2/models/Slow/infer", body)
        while not Slow.busy:
            await asyncio.sleep(0)
        assert await load(house) == 0
        writer.close()
