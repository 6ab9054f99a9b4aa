"""Models that UM-Bridge servers compute, served as our own: `runtime: umbridge`."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dragoman.client.address import Address, address
from dragoman.core.calls import ApplyHessian, ApplyJacobian, Gradient, Infer, SignatureFor
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import Signature
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.tensor import Tensor
from dragoman.core.vectors import Vector
from dragoman.runtimes.umbridge_remote import Remote
from dragoman.runtimes.vectors import VectorModel

T = TypeVar("T")

# What `parameters` may say, with the kinds of each.
_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "urls": (str, list),
    "model": str,
    "config": dict,
    "timeout_s": (int, float),
    "concurrency": int,
    "token": str,
    "headers": dict,
    "tls_ca": str,
}
_CONCURRENCY = 16


class UmBridgeModel(VectorModel):
    """A remote model. Its parameters: `urls`, one or several (or its uri is one); `model`, its name there; `config`,
    what goes with every call; `timeout_s` of a call; `concurrency`, how many calls are under way at a time (16);
    `token`, `headers` and `tls_ca` for the servers."""

    placement: Placement = "inline"
    platform = "umbridge"
    function: Remote

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, remote(spec), "inline")
        self._threads = ThreadPoolExecutor(spec.parameters.get("concurrency", _CONCURRENCY), f"umbridge-{spec.name}")

    def load(self) -> Any:
        try:
            self.function.connect()
        except Exception:
            self.close()  # nobody closes what was never loaded
            raise
        super().load()

    def close(self) -> Any:
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    # Its methods wait for servers, so they are `async` and a thread each does the waiting.

    async def _evaluate(self, call: Infer) -> dict[str, Tensor]:  # type: ignore[override]
        return await self._waited(super()._evaluate, call)

    async def _gradient(self, call: Gradient) -> Vector:  # type: ignore[override]
        return await self._waited(super()._gradient, call)

    async def _apply_jacobian(self, call: ApplyJacobian) -> Vector:  # type: ignore[override]
        return await self._waited(super()._apply_jacobian, call)

    async def _apply_hessian(self, call: ApplyHessian) -> Vector:  # type: ignore[override]
        return await self._waited(super()._apply_hessian, call)

    async def signature_for(self, call: SignatureFor) -> Signature:  # type: ignore[override]
        return await self._waited(super().signature_for, call)

    async def _waited(self, method: Callable[[Any], T], call: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, method, call)


def remote(spec: ModelSpec) -> Remote:
    """The remote function that a spec's parameters tell of. Raises ModelFailed naming a parameter that is wrong."""
    given = spec.parameters
    for key, value in given.items():
        if key not in _KEYS:
            raise ModelFailed(f"there is no parameter '{key}'; there are {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise ModelFailed(f"parameter '{key}' has the wrong kind of value: {value!r}")
    if given.get("concurrency", 1) < 1:
        raise ModelFailed(f"parameter 'concurrency': expected at least 1, got {given['concurrency']}")
    return Remote(_addresses(spec), given.get("model", ""), given.get("config", {}), float(given.get("timeout_s", 0.0)))


def _addresses(spec: ModelSpec) -> list[Address]:
    given = spec.parameters
    urls = given.get("urls", spec.uri if "://" in spec.uri else "")
    listed = [u.strip() for u in urls.split(",")] if isinstance(urls, str) else list(urls)
    if not any(listed):
        raise ModelFailed("expected the parameter 'urls', as http://host:4242 or a list of such")
    try:
        return [
            address(str(url), given.get("token", ""), given.get("headers"), None, given.get("tls_ca", ""), True)
            for url in listed
        ]
    except InvalidInput as fault:
        raise ModelFailed(f"parameter 'urls': {fault.message}") from fault
