"""Load one model of a folder and answer example requests: for `dragoman doctor`, in a process of its own."""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from dragoman.core.calls import Describe, Infer, Request
from dragoman.core.errors import DragomanError, NotReady
from dragoman.engine.deployment import Deployment
from dragoman.engine.engine import Engine
from dragoman.engine.warmup import read_requests
from dragoman.engine_setup import open_engine
from dragoman.settings import from_environment


def try_model(path: str, name: str, allow_pickle: bool, files: Sequence[str]) -> dict[str, str]:
    """Load a model and answer the requests in files; return the errors by what failed, without files also that of its
    trial. Other models are not loaded, but for those that it calls."""
    return asyncio.run(_try_model(path, name, allow_pickle, files))


async def _try_model(path: str, name: str, allow_pickle: bool, files: Sequence[str]) -> dict[str, str]:
    changes: Any = {**from_environment(os.environ), "load_on_demand": True, "watch": False}
    if allow_pickle:
        changes["allow_pickle"] = True
    errors: dict[str, str] = {}
    try:
        async with open_engine(path, **changes) as engine:
            for deployment in [each for each in engine.deployments() if each.spec.name == name]:
                try:
                    await deployment.wait_until_loaded(Request(Describe(), name), time.monotonic())
                except NotReady as error:  # whose message is for clients, without the reason
                    errors["loading"] = deployment.reason or error.message
                    continue
                if deployment.trial_error and not files:
                    errors["trial"] = deployment.trial_error
                for file in files:
                    errors |= await _answer_requests(engine, deployment, Path(file))
    except DragomanError as error:
        errors["loading"] = error.message
    return errors


async def _answer_requests(engine: Engine, deployment: Deployment, file: Path) -> dict[str, str]:
    """Send the requests in a file; return the errors."""
    try:
        calls = read_requests(file)
    except DragomanError as error:
        return {file.name: error.message}
    errors = {}
    for number, call in enumerate(calls, 1):
        try:
            await _answer(engine, deployment, call)
        except DragomanError as error:
            errors[f"{file.name}, request {number}"] = error.message
    return errors


async def _answer(engine: Engine, deployment: Deployment, call: Infer) -> None:
    request = Request(call, deployment.spec.name, deployment.spec.version)
    if not deployment.loaded.streams:
        await engine.call(request)
        return
    async with aclosing(engine.stream(request)) as responses:
        async for response in responses:
            if isinstance(response.answer, DragomanError):
                raise response.answer
