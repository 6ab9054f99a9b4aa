"""The first request to try for each kind of model that a server has: text, embeddings, simulator, tensors."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

from dragoman.core.calls import Embed, Generate, Infer, ModelDescription, SignatureFor
from dragoman.core.examples import model_example
from dragoman.core.options import split_list
from dragoman.engine.deployment import Deployment
from dragoman.protocols.openapi.model import request_example
from dragoman.server import Server

# Longer bodies are left to `dragoman infer --example`, which makes them from the shapes of the example.
_MAX_BODY = 300


def first_requests(server: Server) -> Iterator[str]:
    """Yield a command for the first model of each kind that is ready."""
    kinds: set[str] = set()
    for deployment in server.engine.deployments():
        if not deployment.ready or not deployment.is_loaded:
            continue
        kind = _kind(deployment)
        command = _command(server, deployment, kind) if kind not in kinds else ""
        if command:
            kinds.add(kind)
            yield command
            if "/v1/chat/" in command:
                ca = f" --ca {shlex.quote(server.settings.tls_cert)}" if server.settings.tls_cert else ""
                yield f"dragoman chat {server.http_url} {shlex.quote(deployment.spec.name)}{ca}"


def _kind(deployment: Deployment) -> str:
    calls = deployment.loaded.calls
    kinds = {Generate: "text", Embed: "embeddings", SignatureFor: "simulator"}
    return next((kind for call, kind in kinds.items() if call in calls), "tensors")


def _command(server: Server, deployment: Deployment, kind: str) -> str:
    """Return a command that runs as pasted; "" if no protocol of the server has one."""
    model, protocols = server.engine.description(deployment), split_list(server.settings.protocols)
    name, loaded = model.name, deployment.loaded
    if model.answered_no_example:
        return ""
    if kind == "text" and "openai" in protocols:
        if loaded.details.get("chat_template", True):
            message = {"role": "user", "content": "Hello"}
            return _curl(server, "/v1/chat/completions", {"model": name, "messages": [message]})
        return _curl(server, "/v1/completions", {"model": name, "prompt": "Hello", "max_tokens": 32})
    if kind == "embeddings" and "openai" in protocols:
        return _curl(server, "/v1/embeddings", {"model": name, "input": "Hello"})
    if kind == "simulator" and "umbridge" in protocols:
        return _curl(server, "/Evaluate", {"name": name, "input": _point(model)})
    if Infer not in loaded.calls:
        return ""
    if "oip_rest" not in protocols:
        return f"dragoman infer grpc://{server.grpc_url} {shlex.quote(name)} --example" if server.grpc_url else ""
    infer = f"dragoman infer {server.http_url} {shlex.quote(name)}"
    if model_example(model) is None:
        return infer
    body = request_example(model)
    command = "" if body is None else _curl(server, f"/v2/models/{name}/infer", body)
    return command if 0 < len(command) <= _MAX_BODY else f"{infer} --example"


def _point(model: ModelDescription) -> list[list[float]]:
    """Return the point at which a simulator was evaluated when it was loaded, else its default point, else zeros."""
    if model.example is not None:
        return [tensor.data.reshape(-1).tolist() for tensor in model.example.values()]
    sizes = [spec.shape[-1] if spec.shape and spec.shape[-1] > 0 else 1 for spec in model.signature.inputs]
    point: list[Any] = [list(each) for each in model.details.get("point", [])]
    return point if [len(each) for each in point] == sizes else [[0.0] * size for size in sizes]


def _curl(server: Server, path: str, body: Any) -> str:
    settings = server.settings
    flags = f" --cacert {shlex.quote(settings.tls_cert)}" if settings.tls_cert else ""
    if settings.needs_keys:
        flags += ' -H "Authorization: Bearer $DRAGOMAN_API_KEY"'
    return f"curl{flags} {server.http_url}{shlex.quote(path)} -d {shlex.quote(json.dumps(body))}"
