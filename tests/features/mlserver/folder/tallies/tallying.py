# mypy: ignore-errors
"""A model with paths of its own."""

from typing import Annotated, Optional

from fastapi import Body, Depends, Header, Query
from mlserver import MLModel, log, register
from mlserver.handlers import custom_handler
from mlserver.types import InferenceRequest, InferenceResponse
from starlette.requests import Request


async def _first_byte(request: Request, unit: str = "m") -> str:
    return f"{(await request.body())[:1].decode()}{unit}"


class Tallies(MLModel):
    async def load(self) -> bool:
        register("tally_size", "How many numbers a tally has")
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(model_name=self.name, outputs=[])

    @custom_handler(rest_path="/my-custom-endpoint")
    async def my_payload(self, payload: list) -> int:
        log(tally_size=len(payload))
        return sum(payload)

    @custom_handler(rest_path="/scores/{name}/{turn}", rest_method="GET")
    def score(self, name: str, turn: int, factor: float = 1.0, shout: Optional[bool] = None) -> dict:
        return {"name": name.upper() if shout else name, "score": turn * factor}

    @custom_handler(rest_path="/mixed", rest_method="PUT")
    async def mixed(self, rows: list, options: dict, unit: str = "m") -> dict:
        return {"rows": len(rows), "options": sorted(options), "unit": unit}

    @custom_handler(rest_path="/request-body")
    async def request_body(self, request: Request) -> list:
        return [request.method, request.query_params["unit"], sum(await request.json())]

    @custom_handler(rest_path="/length")
    async def length(self, length: int = Body(...)) -> int:
        return length

    @custom_handler(rest_path="/marked")
    async def marked(
        self,
        rows: Annotated[list, Body(embed=True)],
        limit: int = Query(3, alias="max"),
        content_type: str = Header(),
        start: str = Depends(_first_byte),
    ) -> list:
        return [rows[:limit], content_type, start]

    @custom_handler(rest_path="/generate")
    async def generate(self, count: int = Body(...)) -> list:
        return list(range(count))

    @custom_handler(rest_path="/version", rest_method="GET")
    def own_version(self) -> str:
        return "tallies 1"

    @custom_handler(rest_path="/health")
    def check_health(self, limit: int = Body(...)) -> int:
        return limit

    @custom_handler(rest_path="/v2", rest_method="GET")
    def never(self) -> None: ...

    @custom_handler(rest_path="/broken")
    async def broken(self, payload: dict) -> dict:
        return {"answer": 1 / payload["zero"]}
