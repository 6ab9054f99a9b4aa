"""Models of UM-Bridge servers."""

import time
from collections.abc import Mapping
from typing import Any

from dragoman.client.address import Address, address
from dragoman.core.errors import InvalidInput, ModelFailed, NotReady
from dragoman.core.spec import ModelSpec, Placement
from dragoman.runtimes.umbridge.remote import RemoteFunction
from dragoman.runtimes.waiting_model import WaitingModel

# What `parameters` may say, with the kinds of each.
_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "urls": (str, list),
    "model": str,
    "config": dict,
    "timeout_s": (int, float),
    "wait_s": (int, float),
    "check_s": (int, float),
    "concurrency": int,
    "token": str,
    "headers": dict,
    "tls_ca": str,
}
_CONCURRENCY = 16
_AGAIN_S = 0.2


class UmBridgeModel(WaitingModel):
    """A remote model. Its parameters:

    urls: one or several (or the uri is one). model: its name there. config: sent with every call.
    timeout_s: of a call. concurrency: maximum number of simultaneous calls (16).
    wait_s: how long loading waits for a server to start (0) before it fails and is retried later.
    check_s: interval of health checks of idle servers (5); 0 disables them.
    token, headers, tls_ca: for the servers.
    """

    placement: Placement = "inline"
    platform = "umbridge"
    function: RemoteFunction

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, remote(spec), spec.parameters.get("concurrency", _CONCURRENCY))

    def load(self) -> Any:
        try:
            self._connect()
        except Exception:
            self.close()  # nobody closes what was never loaded
            raise
        super().load()

    def _connect(self) -> None:
        end_s = time.monotonic() + self.spec.parameters.get("wait_s", 0)
        while True:
            try:
                self.function.connect()
                return
            except NotReady:
                if time.monotonic() > end_s:
                    raise
            time.sleep(_AGAIN_S)


def remote(spec: ModelSpec) -> RemoteFunction:
    """Return the remote function of a spec's parameters. Raises ModelFailed naming an invalid parameter."""
    given = spec.parameters
    for key, value in given.items():
        if key not in _KEYS:
            raise ModelFailed(f"there is no parameter '{key}'; there are {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise ModelFailed(f"parameter '{key}' has the wrong kind of value: {value!r}")
    if given.get("concurrency", 1) < 1:
        raise ModelFailed(f"parameter 'concurrency': expected at least 1, got {given['concurrency']}")
    limits = {key: float(given[key]) for key in ("timeout_s", "check_s") if key in given}
    return RemoteFunction(_addresses(spec), given.get("model", ""), given.get("config", {}), **limits)


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
    except InvalidInput as error:
        raise ModelFailed(f"parameter 'urls': {error.message}") from error
