"""Identity and a slow model on FastAPI and uvicorn, and token streams in the style of vLLM's server.

The stream has the classes, the serialization by pydantic and the StreamingResponse of vllm/entrypoints/openai, without
logs and metrics. Its engine is a stub.

usage: python fastapi_server.py HTTP_PORT GRPC_PORT MODEL...
"""

import sys
import time
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from token_ticks import TokenEngine  # type: ignore[import-not-found]

app = FastAPI()
app.add_middleware(
    CORSMiddleware, allow_origins=["*"], allow_credentials=False, allow_methods=["*"], allow_headers=["*"]
)
engine = TokenEngine()


class Numbers(BaseModel):
    input: list[list[float]]


@app.get("/health")
async def health() -> dict[str, str]:
    return {}


@app.post("/predict")
async def predict(numbers: Numbers) -> dict[str, Any]:
    return {"output": np.asarray(numbers.input, np.float32).tolist()}


@app.post("/slow")
def slow(numbers: Numbers) -> dict[str, Any]:
    time.sleep(0.05)
    return {"output": np.asarray(numbers.input, np.float32).tolist()}


# --- token streams ------------------------------------------------------------------------------------------------


class OpenAiModel(BaseModel):
    model_config = ConfigDict(extra="allow")


class CompletionRequest(OpenAiModel):
    model: str | None = None
    prompt: str
    max_tokens: int | None = 16
    stream: bool | None = False
    temperature: float | None = None


class StreamChoice(OpenAiModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = Field(default=None, description="The stop string or token id")
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Usage(OpenAiModel):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0


class StreamResponse(OpenAiModel):
    id: str = Field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[StreamChoice]
    usage: Usage | None = Field(default=None)


@app.post("/v1/completions")
async def completions(request: CompletionRequest) -> StreamingResponse:
    return StreamingResponse(_events(request), media_type="text/event-stream")


async def _events(request: CompletionRequest) -> Any:
    name, created, generated = f"cmpl-{uuid4().hex}", int(time.time()), 0
    limit = request.max_tokens or 16
    async for text, count in engine.tokens(limit):
        generated += count
        choice = StreamChoice(
            index=0,
            text=text,
            logprobs=None,
            finish_reason="length" if generated == limit else None,
            stop_reason=None,
            prompt_token_ids=None,
            token_ids=None,
        )
        chunk = StreamResponse(
            id=name, object="text_completion", created=created, model=request.model or "", choices=[choice]
        )
        yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
    yield "data: [DONE]\n\n"


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False, backlog=2048)
