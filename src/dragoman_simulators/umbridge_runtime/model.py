"""Models of UM-Bridge servers."""

import time
from collections.abc import Mapping
from typing import Any

from dragoman.client.messages import Address, address
from dragoman.core.errors import InvalidInput, ModelFailed, NotReady
from dragoman.core.spec import ModelSpec, Placement
from dragoman_simulators.simulator_model import WaitingModel
from dragoman_simulators.umbridge_runtime.remote import RemoteFunction

# The parameters of the runtime and their types.
_PARAMETERS: Mapping[str, type | tuple[type, ...]] = {
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
_RETRY_S = 0.2


class UmBridgeModel(WaitingModel):
    """A remote model.

    Parameters of the spec
    ----------------------
    urls : of one or several servers; or the uri is one.
    model : its name on the servers.
    config : sent with every call.
    timeout_s : of a call.
    concurrency : maximum number of simultaneous calls (16).
    wait_s : how long loading waits for a server to start (0) before it fails and is retried later.
    check_s : interval of health checks of idle servers (5); 0 disables them.
    token, headers, tls_ca : for the servers.
    """

    placement: Placement = "inline"
    platform = "umbridge_model"
    function: RemoteFunction

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, make_function(spec), spec.parameters.get("concurrency", _CONCURRENCY))

    def load(self) -> Any:
        try:
            self._connect()
        except Exception:
            self.close()  # a model that was not loaded is not closed by its owner
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
            time.sleep(_RETRY_S)


def make_function(spec: ModelSpec) -> RemoteFunction:
    """Return the remote function of a spec's parameters. Raises ModelFailed naming an invalid parameter."""
    parameters = spec.parameters
    for key, value in parameters.items():
        if key not in _PARAMETERS:
            raise ModelFailed(f"unknown parameter '{key}': expected one of {', '.join(_PARAMETERS)}")
        if not isinstance(value, _PARAMETERS[key]) or isinstance(value, bool):
            raise ModelFailed(f"parameter '{key}': expected {_type_name(key)}, got {value!r}")
    if parameters.get("concurrency", 1) < 1:
        raise ModelFailed(f"parameter 'concurrency': expected at least 1, got {parameters['concurrency']}")
    times = {key: float(parameters[key]) for key in ("timeout_s", "check_s") if key in parameters}
    return RemoteFunction(_addresses(spec), parameters.get("model", ""), parameters.get("config", {}), **times)


def _type_name(key: str) -> str:
    types = _PARAMETERS[key]
    return " or ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))


def _addresses(spec: ModelSpec) -> list[Address]:
    parameters = spec.parameters
    urls = parameters.get("urls", spec.uri if "://" in spec.uri else "")
    listed = [u.strip() for u in urls.split(",")] if isinstance(urls, str) else list(urls)
    if not any(listed):
        raise ModelFailed("expected the parameter 'urls', such as http://host:4242, or a list of URLs")
    token = parameters.get("token", "")
    try:
        return [
            address(str(url), token, parameters.get("headers"), None, parameters.get("tls_ca", ""), True)
            for url in listed
        ]
    except InvalidInput as error:
        raise ModelFailed(f"parameter 'urls': {error.message}") from error
