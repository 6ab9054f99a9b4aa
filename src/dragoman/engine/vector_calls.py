"""Calls about vectors, bound to the sizes that the model has under each call's config."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from dragoman.core.binding import bind
from dragoman.core.calls import DerivativeCall, Infer, Request, SignatureFor
from dragoman.core.errors import InvalidOutput
from dragoman.core.signature import Signature
from dragoman.core.tensor import NONE
from dragoman.core.vector_binding import (
    Face,
    bind_derivative,
    bind_evaluation,
    check_answer,
    config_in,
    config_key,
    face,
)
from dragoman.core.vectors import Config
from dragoman.workers.pool import Loaded

# Of so many configs the signatures are remembered.
_REMEMBERED = 256

Ask = Callable[[Request[Signature]], Awaitable[Signature]]


@dataclass(frozen=True, slots=True)
class Sized:
    """A model's signature under one config, and the model as a function of vectors, if it is one."""

    signature: Signature
    face: Face | None

    @classmethod
    def of(cls, signature: Signature) -> "Sized":
        return cls(signature, face(signature))

    def check(self, answer: Any, call: Any) -> None:
        """InvalidOutput unless the answer has the sizes of this config, of which the model's worker knows nothing."""
        if self.face is not None:
            check_answer(answer, call, self.signature, self.face)


class VectorCalls:
    """Binds the calls about vectors of one model; asks it for its signature where a config may change that."""

    def __init__(self, loaded: Loaded, name: str) -> None:
        self._name = name
        self._configurable = SignatureFor in loaded.calls
        self._usual = Sized.of(loaded.signature)
        self._known: OrderedDict[str, Sized] = OrderedDict()

    def about(self, call: Any) -> bool:
        """Whether a call is bound here: it has positions, asks for a derivative, or may have a config."""
        if isinstance(call, Infer):
            return call.positional is not None or self._configurable
        return isinstance(call, DerivativeCall)

    def opened(self, call: Any) -> Any:
        """The call with the config that it brought as a parameter, which every wire has, where the model takes one."""
        if self._configurable and isinstance(call, Infer) and "config" in call.parameters:
            return config_in(call)
        return call

    def depends(self, call: Any) -> bool:
        """Whether the sizes that hold for a call have to be looked up: it has a config, or asks for the sizes."""
        if not self._configurable or isinstance(call, SignatureFor):
            return isinstance(call, SignatureFor)
        return bool(getattr(call, "config", None)) or self._usual.face is None

    def bound_now(self, call: Any) -> Any:
        """A call of any kind, bound where that is done here; None where its sizes have to be looked up."""
        kind, known = type(call), self._usual.face
        if known is not None:  # as most are
            if kind is Infer and call.positional is not None and not (call.config or call.parameters):
                return bind_evaluation(call, known, self._name)
            if issubclass(kind, DerivativeCall) and not call.config:
                return bind_derivative(call, known, self._name)
        if self._configurable:
            call = self.opened(call)
            if self.depends(call):
                return None
        return self.bound(call) if self.about(call) else call

    def bound(self, call: Any, sized: Sized | None = None) -> Any:
        """The call with its positions named and its sizes checked, by default those without a config."""
        sized = sized or self._usual
        if isinstance(call, DerivativeCall):
            return bind_derivative(call, sized.face, self._name)
        if call.positional is None:
            return bind(call, sized.signature, self._name)
        return bind_evaluation(call, sized.face, self._name)

    async def sized(self, request: Request[Any], ask: Ask) -> Sized:
        """The model under the request's config, as `ask` tells or as it is remembered."""
        config: Config = getattr(request.call, "config", NONE)
        if not self._configurable or not (config or self._usual.face is None):
            return self._usual
        key = config_key(config)
        found = self._known.get(key)
        if found is None:
            signature: Any = await ask(replace(request, call=SignatureFor(config)))
            if not isinstance(signature, Signature):
                told = type(signature).__name__
                raise InvalidOutput(f"model '{self._name}': expected a signature for its config, got {told}")
            found = Sized.of(signature)
        self._known[key] = found
        self._known.move_to_end(key)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found
