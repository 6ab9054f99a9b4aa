"""Ensembles of Triton: models of the server whose outputs are the inputs of others."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from dragoman.core.calls import Infer, Inference, Request, Response
from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed, ModelNotFound
from dragoman.core.model import Model
from dragoman.core.sequences import parse_flag
from dragoman.core.signature import Shape, Signature, TensorSpec
from dragoman.core.spec import COMPLETED_CONFIG, ModelSpec, SiblingModels
from dragoman.core.tensor import NONE, Parameters, Tensor
from dragoman_triton.ensemble_streams import split_step
from dragoman_triton.tensors import Configuration

log = logging.getLogger("dragoman.model")

# Responses of a step whose following steps run at a time, without `max_inflight_requests`.
_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True)
class _EnsembleStep:
    """A model and its tensors. inputs: from its names to those of the ensemble; outputs: from those of the ensemble.

    optional: names of its inputs that a request may leave out.
    ranks: of its inputs, in an ensemble without a batch axis.
    streams: it may have several responses.
    origin: number of the step whose responses feed it, 0 for the request itself.
    number: identifies its responses, as the origin of the steps that they feed.
    """

    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    optional: frozenset[str] = frozenset()
    streams: bool = False
    origin: int = 0
    number: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)


class EnsembleModel(Model):
    """An ensemble. A step runs as soon as its inputs exist, and only if a requested output depends on it.

    The steps that a decoupled model feeds run for each of its responses, and their outputs are a response each. In an
    ensemble without a batch axis, a step with one computes one row.
    """

    takes_request = True
    platform = "ensemble"
    kind = "ensemble"
    merges = 0

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._config = Configuration(spec.parameters["config"])

    def load(self) -> None:
        if self.spec.siblings is None:
            raise ModelFailed("an ensemble runs in the server's process: expected placement 'inline' or none")
        self._siblings: SiblingModels = self.spec.siblings
        tensors = {t.spec.name: (t.spec, False) for t in (*self._config.inputs, *self._config.outputs)}
        ranks = {t.spec.name: len(t.spec.shape or ()) for t in self._config.outputs}
        self._ranks = {} if self._config.max_batch_size else ranks
        steps = self.spec.parameters["config"]["ensemble_scheduling"]["step"]
        self._optional_outputs: set[str] = set()
        self._steps = _with_origins(
            [self._load_step(step, tensors) for step in steps], [t.spec.name for t in self._config.outputs]
        )
        if any(step.streams for step in self._steps):
            self.infer_stream = self._stream

    def _load_step(self, table: Mapping[str, Any], tensors: "_KnownTensors") -> _EnsembleStep:
        """Wait for the model of a step, and check its tensors against `tensors`, to which new ones are added."""
        name, number = str(table["model_name"]), int(table["model_version"])
        try:
            signature = self._siblings.describe(name).signature
        except ModelNotFound as error:
            raise ModelFailed(f"step '{name}': model not found: serve it in the same folder") from error
        optional: set[str] = set()
        ranks: dict[str, int] = {}
        has_rows = signature.batched and not self._config.max_batch_size
        for theirs, ours in table["input_map"].items():
            spec = signature.input(theirs)
            if spec is None and not signature.open_inputs:
                raise ModelFailed(f"step '{name}': it has no input '{theirs}'")
            if spec is not None:
                optional |= {theirs} if spec.optional else set()
                ranks |= {} if self._config.max_batch_size or spec.shape is None else {theirs: len(spec.shape)}
                _check_agreement(name, ours, (spec, has_rows), tensors)
        for spec in signature.inputs:
            if not spec.optional and spec.name not in table["input_map"]:
                raise ModelFailed(f"step '{name}': its input '{spec.name}' is not in input_map")
        for theirs, ours in table["output_map"].items():
            spec = signature.output(theirs)
            if spec is None and not signature.open_outputs:
                raise ModelFailed(f"step '{name}': it has no output '{theirs}'")
            if spec is not None:
                self._optional_outputs |= {ours} if spec.optional else set()
                _check_agreement(name, ours, (spec, has_rows), tensors)
        outputs = {ours: theirs for theirs, ours in table["output_map"].items()}
        version = "" if number < 0 else str(number)
        streams = self._siblings.streams(name)
        inputs = dict(table["input_map"])
        return _EnsembleStep(name, version, inputs, outputs, frozenset(optional), streams, ranks=ranks)

    def signature(self) -> Signature:
        names = (tensor.spec.name for tensor in self._config.outputs)
        return self._config.signature(optional_outputs=self._optional_outputs.intersection(names))

    def details(self) -> Mapping[str, Any]:
        graph = {"nodes": {name: {} for name in self._step_names()}, "edges": [*self._edges()]}
        if not any(step.streams for step in self._steps):
            return {"graph": graph}
        config = {**self.spec.parameters["config"], "model_transaction_policy": {"decoupled": True}}
        return {"graph": graph, COMPLETED_CONFIG: config}

    def _step_names(self) -> list[str]:
        """Return a name for each step: its model, with a number if that has several steps."""
        models = [step.model for step in self._steps]
        numbered = ((name, models[:i].count(name) + 1) for i, name in enumerate(models))
        return [f"{name} ({number})" if models.count(name) > 1 else name for name, number in numbered]

    def _edges(self) -> Iterator[Mapping[str, Any]]:
        """Yield what feeds each input of a step, then the outputs, with the names of the tensors."""
        names = self._step_names()
        origins: dict[str, Mapping[str, str]] = {t.spec.name: {"input": t.spec.name} for t in self._config.inputs}
        for name, step in zip(names, self._steps, strict=True):
            origins |= {ours: {"node": name, "port": theirs} for ours, theirs in step.outputs.items()}
        for name, step in zip(names, self._steps, strict=True):
            for theirs, ours in sorted(step.inputs.items()):
                yield {"from": origins[ours], "to": {"node": name, "port": theirs}, "tensor": ours}
        for tensor in self._config.outputs:
            yield {"from": origins[tensor.spec.name], "to": {"output": tensor.spec.name}, "tensor": tensor.spec.name}

    def unavailable(self) -> str:
        reasons = (self._siblings.unavailable(step.model) for step in self._steps)
        return next(filter(None, reasons), "")

    async def infer(self, request: Request[Inference]) -> Inference:  # type: ignore[override]
        call: Any = request.call
        self._config.rows(call)
        requested = self._config.requested_outputs(call)
        tensors = await self._compute(request, call.inputs, self._needed_steps(requested))
        return self._response(request, requested, tensors)

    def _response(self, request: Request[Inference], wanted: Sequence[str], tensors: Mapping[str, Tensor]) -> Inference:
        """Return the requested outputs, without those that a step may leave out and did."""
        absent = [name for name in wanted if name not in tensors]
        if not self._optional_outputs.issuperset(absent):
            raise InvalidOutput(self._text(f"no step returned {', '.join(map(repr, absent))}"))
        for name in absent:
            log.debug("Composing models did not output tensor %s: ensemble=%s", name, self.spec.name)
        call: Any = request.call
        outputs = {n: _with_rank(tensors[n], self._ranks.get(n)) for n in wanted if n in tensors}
        return Inference(outputs, _sequence_parameters(call.parameters) if call.parameters else NONE)

    async def _compute(
        self, request: Request[Inference], given: Mapping[str, Tensor], steps: Sequence[_EnsembleStep]
    ) -> dict[str, Tensor]:
        """Return the given tensors and the outputs of steps. If one fails, those that still run are cancelled."""
        tensors, waiting = dict(given), [*steps]
        produced = {name for step in steps for name in step.outputs}
        missing = {name for step in steps for name in step.inputs.values()} - produced - set(given)
        running: dict[asyncio.Task[Inference], _EnsembleStep] = {}
        try:
            while waiting or running:
                ready = [step for step in waiting if _is_ready(step, tensors, missing)]
                waiting = [step for step in waiting if step not in ready]
                requests = [(step, _request(request, step, tensors)) for step in ready]
                if len(ready) == 1 and not running:  # of a chain of steps: no task of its own
                    answered = [(step, await self._call(sub_request)) for step, sub_request in requests]
                else:
                    running |= {asyncio.ensure_future(self._call(each)): step for step, each in requests}
                    if not running:
                        names = self._names(waiting)
                        raise InvalidInput(self._text(f"no step can produce {names}: its inputs are missing"))
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    answered = [(running.pop(task), task.result()) for task in done]
                for step, inference in answered:
                    outputs = inference.outputs
                    tensors |= {ours: outputs[theirs] for ours, theirs in step.outputs.items() if theirs in outputs}
                    missing |= set(step.outputs) - set(tensors)
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.gather(*running, return_exceptions=True)
        return tensors

    async def _call(self, request: Request[Inference]) -> Inference:
        """Return the answer of a step. Errors name the ensemble."""
        try:
            begun = self._siblings.begin(request)
            response: Response[Inference] = begun if isinstance(begun, Response) else await begun
            return response.answer
        except DragomanError as error:
            raise self._with_location(error) from error

    # --- streams ---------------------------------------------------------------------------------------------

    async def _stream(self, request: Request[Inference]) -> AsyncIterator[Inference]:
        call: Any = request.call
        self._config.rows(call)
        requested = self._config.requested_outputs(call)
        responses = self._responses(request, requested, self._needed_steps(requested), 0, call.inputs)
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def _responses(
        self,
        request: Request[Inference],
        wanted: Sequence[str],
        steps: Sequence[_EnsembleStep],
        origin: int,
        given: Mapping[str, Tensor],
        *,
        is_last: bool = True,
    ) -> AsyncGenerator[Inference, None]:
        """Yield the responses that follow from the tensors of the request, or of a response of step `origin`, which may
        be known to be the last one."""
        own = [step for step in steps if step.origin == origin and not step.streams]
        tensors = await self._compute(request, given, own) if not origin else given
        splitting = next((step for step in steps if step.origin == origin and step.streams), None)
        if splitting is None:
            yield structs.replace(self._response(request, wanted, tensors), is_last=is_last)
            return
        if not _is_ready(splitting, tensors, set(splitting.inputs.values()) - set(tensors)):
            raise InvalidInput(self._text(f"no step can produce {self._names([splitting])}: its inputs are missing"))
        following = [step for step in steps if step.origin == splitting.number and not step.streams]

        async def follow(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            renamed = {ours: outputs[theirs] for ours, theirs in splitting.outputs.items() if theirs in outputs}
            return await self._compute(request, renamed, following)

        limit = self.spec.parameters["config"]["ensemble_scheduling"].get("max_inflight_requests") or _IN_FLIGHT
        branches = split_step(self._siblings.responses(_request(request, splitting, tensors)), follow, limit)
        try:
            async with aclosing(branches):
                async for branch, is_last_branch in branches:
                    below = self._responses(
                        request, wanted, steps, splitting.number, branch, is_last=is_last and is_last_branch
                    )
                    async with aclosing(below):
                        async for response in below:
                            yield response
        except DragomanError as error:
            raise self._with_location(error) from error

    def _needed_steps(self, wanted: Sequence[str]) -> list[_EnsembleStep]:
        """Return the steps on which outputs depend, in the order of the configuration."""
        needed, names = [], set(wanted)
        for _ in self._steps:
            for step in self._steps:
                if step not in needed and names & set(step.outputs):
                    needed.append(step)
                    names |= set(step.inputs.values())
        return [step for step in self._steps if step in needed]

    def _names(self, steps: Sequence[_EnsembleStep]) -> str:
        return ", ".join(repr(name) for step in steps for name in step.outputs)

    def _with_location(self, error: DragomanError) -> DragomanError:
        """Return an error of a step that names the ensemble."""
        return error if error.message.startswith(self._text("")) else type(error)(self._text(error.message))

    def _text(self, message: str) -> str:
        return f"in ensemble '{self.spec.name}', {message}"


def _with_origins(steps: Sequence[_EnsembleStep], outputs: Sequence[str]) -> list[_EnsembleStep]:
    """Return the steps with their origins. Raises ModelFailed, as Triton does, for tensors of different responses."""
    producers = {name: i for i, step in enumerate(steps) for name in step.outputs}
    ordered: dict[int, _EnsembleStep] = {}

    def origins(names: Sequence[str]) -> set[int]:
        return {resolve(producers[name]).number for name in names if name in producers} | {
            0 for name in names if name not in producers
        }

    def resolve(i: int) -> _EnsembleStep:
        if i not in ordered:
            step = ordered[i] = steps[i]  # of a cycle, which never runs
            sources = origins([*step.inputs.values()])
            if len(sources) > 1:
                raise ModelFailed(
                    f"step of model '{step.model}' receives inputs originated from different decoupled models"
                )
            (origin,) = sources
            ordered[i] = replace(step, origin=origin, number=i + 1 if step.streams else origin)
        return ordered[i]

    resolved = [resolve(i) for i in range(len(steps))]
    if len(origins(outputs)) > 1:
        raise ModelFailed("the outputs receive tensors originated from different decoupled models")
    return resolved


def _is_ready(step: _EnsembleStep, tensors: Mapping[str, Tensor], missing: set[str]) -> bool:
    """Return whether all inputs of a step exist, but for optional ones that will not."""
    return all(ours in tensors or (theirs in step.optional and ours in missing) for theirs, ours in step.inputs.items())


def _request(request: Request[Inference], step: _EnsembleStep, tensors: Mapping[str, Tensor]) -> Request[Inference]:
    given = {theirs: tensors[ours] for theirs, ours in step.inputs.items() if ours in tensors}
    inputs = {theirs: _with_rank(tensor, step.ranks.get(theirs)) for theirs, tensor in given.items()}
    call: Any = request.call
    sub_call = Infer(inputs, tuple(step.outputs.values()), call.parameters)
    return Request(sub_call, step.model, step.version, request.id, request.deadline_s, request.metadata)


def _sequence_parameters(given: Parameters) -> Parameters:
    """Return the parameters of the response to a request of a sequence: its place, as in Triton."""
    if "sequence_id" not in given:
        return NONE
    flags = {name: parse_flag(given, name) for name in ("sequence_start", "sequence_end")}
    return {"sequence_id": given["sequence_id"], **flags}


def _with_rank(tensor: Tensor, rank: int | None) -> Tensor:
    """Return a tensor with a batch axis of one row more or less, if it then has the rank."""
    shape = tensor.data.shape if type(tensor) is Tensor else tensor.shape  # faster than the property
    if rank == len(shape) + 1:
        shape = (1, *shape)
    elif rank == len(shape) - 1 and shape[0] == 1:
        shape = shape[1:]
    else:
        return tensor
    return Tensor(tensor.data.reshape(shape), tensor.datatype, tensor.parameters)


# By name, the first description of each tensor of an ensemble, and whether its first axis is a batch axis that other
# tensors of the ensemble may lack.
_KnownTensors = dict[str, tuple[TensorSpec, bool]]


def _check_agreement(step: str, tensor: str, found: tuple[TensorSpec, bool], tensors: _KnownTensors) -> None:
    """Raise ModelFailed unless a tensor has the same datatype and shape in all steps that use it.

    A batch axis of a step may be missing, as in Triton.
    """
    (known, known_has_rows), (spec, has_rows) = tensors.setdefault(tensor, found), found
    if known.datatype and spec.datatype and known.datatype is not spec.datatype:
        raise ModelFailed(
            f"step '{step}': inconsistent data type of tensor '{tensor}': {known.datatype} and {spec.datatype}"
        )
    rows, own_rows = known.shape, spec.shape
    if known_has_rows is not has_rows and rows is not None and own_rows is not None:
        rows, own_rows = rows[known_has_rows:], own_rows[has_rows:]
    if not _may_be_equal(known.shape, spec.shape) and not _may_be_equal(rows, own_rows):
        raise ModelFailed(
            f"step '{step}': inconsistent shape of tensor '{tensor}': {list(known.shape or ())} and "
            f"{list(spec.shape or ())}"
        )


def _may_be_equal(first: Shape | None, second: Shape | None) -> bool:
    if first is None or second is None:
        return True
    return len(first) == len(second) and all(a == b or -1 in (a, b) for a, b in zip(first, second, strict=True))
