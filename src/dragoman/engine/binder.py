"""Bind the calls of one model to its signature, which may depend on the config of the call."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from dragoman.core.binding import bind
from dragoman.core.calls import DerivativeCall, Infer, Request, SignatureFor
from dragoman.core.errors import InvalidOutput
from dragoman.core.signature import Signature
from dragoman.core.tensor import NONE
from dragoman.core.vector_binding import (
    VectorSignature,
    bind_derivative,
    bind_evaluation,
    check_answer,
    config_in,
    config_key,
    vector_signature,
)
from dragoman.core.vectors import Config
from dragoman.workers.pool import Loaded

A = TypeVar("A")
# How many configs have their signature cached.
_CACHE_SIZE = 256

GetSignature = Callable[[Request[Signature]], Awaitable[Signature]]


class ConfiguredSignature(msgspec.Struct, frozen=True):
    """The signature of a model under one config, and the same as sizes of vectors if all its tensors are vectors."""

    signature: Signature
    vectors: VectorSignature | None

    @classmethod
    def of(cls, signature: Signature) -> "ConfiguredSignature":
        return cls(signature, vector_signature(signature))

    def check(self, response: Any, call: Any) -> None:
        """Raise InvalidOutput unless the response has the sizes of this config, which the worker does not check."""
        if self.vectors is not None:
            check_answer(response, call, self.signature, self.vectors)


def bound_request(request: Request[A], bound: Any, deadline_s: float | None) -> Request[A]:
    """Return the request with its deadline, and its bound call unless that is None."""
    call = request.call if bound is None else bound
    metadata, caller, is_trial, times = request.metadata, request.caller, request.is_trial, request.times
    return Request(
        call, request.model, request.version, request.id, deadline_s, metadata, None, caller, is_trial, times
    )


class Binder:
    """Checks calls against the signature of one model. Asks the model for its signature under a config if that may
    change it."""

    def __init__(self, loaded: Loaded, model: str) -> None:
        self._model = model
        self._is_configurable = SignatureFor in loaded.calls
        self._default = ConfiguredSignature.of(loaded.signature)
        self._cache: OrderedDict[str, ConfiguredSignature] = OrderedDict()

    def bind(self, call: Any, to: ConfiguredSignature | None = None) -> Any:
        """Return the call with its tensors named, in order and checked against a signature, by default the model's.

        Returns None if the signature depends on the config of the call, or if the call requests the signature: see
        `bind_configured`.
        """
        if self._is_configurable:
            if type(call) is SignatureFor:
                return None
            if type(call) is Infer and "config" in call.parameters:
                call = config_in(call)
            if to is None and (self._default.vectors is None or getattr(call, "config", None)):
                return None
        if to is None:
            to = self._default
        if type(call) is Infer:
            if call.positional is None:
                return bind(call, to.signature, self._model)
            return bind_evaluation(call, to.vectors, self._model)
        if isinstance(call, DerivativeCall):
            return bind_derivative(call, to.vectors, self._model)
        return None if type(call) is SignatureFor else call

    async def bind_configured(
        self, request: Request[Any], get: GetSignature
    ) -> tuple[Request[Any], ConfiguredSignature]:
        """Return a request that `bind` cannot bind, bound to the signature under its config, and that signature.

        The signature comes from the cache or from `get`. A request for the signature itself is returned as it is.
        """
        call = request.call
        if type(call) is Infer and "config" in call.parameters:
            call = config_in(call)
        configured = await self._signature_for(request, getattr(call, "config", NONE), get)
        if type(call) is SignatureFor:
            return request, configured
        return structs.replace(request, call=self.bind(call, configured)), configured

    async def _signature_for(self, request: Request[Any], config: Config, get: GetSignature) -> ConfiguredSignature:
        if not self._is_configurable or not (config or self._default.vectors is None):
            return self._default
        key = config_key(config)
        configured = self._cache.get(key)
        if configured is None:
            signature: Any = await get(structs.replace(request, call=SignatureFor(config)))
            if not isinstance(signature, Signature):
                got = type(signature).__name__
                raise InvalidOutput(f"model '{self._model}': expected a signature for its config, got {got}")
            configured = ConfiguredSignature.of(signature)
        self._cache[key] = configured
        self._cache.move_to_end(key)
        if len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return configured
