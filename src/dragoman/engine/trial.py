"""The trial of a model when it is loaded: one example request that it has answered, or the error of its answer.

A model is tried with the example that it ships (`examples.json`, or its own `example_inputs`), else with requests made
from its declared inputs, until one is answered. It is ready in any case: made-up numbers may be wrong for a right
model. If none is answered, the reason is reported with its state until it answers a request.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from dragoman.core.calls import Generate, Infer, Inference, SignatureFor, Tensors
from dragoman.core.errors import DragomanError, InvalidInput, NotReady, Overloaded, WorkerLost, public_text
from dragoman.core.examples import example_inputs
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor, numpy_numbers
from dragoman.core.text import Sampling
from dragoman.engine.own_files import OwnFiles
from dragoman.engine.warmup import LoadedReplicas, read_requests
from dragoman.system.load_steps import report_step
from dragoman.workers.pool import Loaded

log = logging.getLogger("dragoman.engine")

_PROMPT = "Hello"
_MAX_CLASSES, _TOLERANCE = 100_000, 2e-3  # of FP16


class Trial(msgspec.Struct, frozen=True):
    """inputs: of the example that the model has answered, None if there is none. outputs: its answer.

    error: why it answered none, "" if it did or was not tried.
    """

    inputs: Tensors | None = None
    outputs: Tensors | None = None
    error: str = ""


NOT_TRIED = Trial()


async def try_model(model: LoadedReplicas) -> Trial:
    """Send example requests to one replica until one is answered, for at most `trial_s` seconds of the model's spec.

    Not tried are models that keep a state, models without declared inputs or a running worker, and simulators outside
    of worker processes, where a long evaluation could not be stopped: another server computes, or a thread. A simulator
    gets one request only, and none if it must not be evaluated at load. Where datatypes or shapes are not declared,
    failing with guessed ones is no failure.
    """
    spec, loaded = model.spec, model.loaded
    is_simulator = SignatureFor in loaded.calls
    is_stoppable = model.placement == "process" or not is_simulator
    is_allowed = spec.trial_s and loaded.details.get("evaluate_at_load", True)
    if not is_allowed or loaded.sequences is not None or not is_stoppable or not model.pool.ready:
        return NOT_TRIED
    report_step("trying an example")
    is_guess = False
    try:
        if Generate in loaded.calls:
            calls: Iterator[Any] = iter([Generate(prompts=(_PROMPT,), sampling=Sampling(max_new_tokens=1))])
        elif Infer in loaded.calls:
            calls, is_guess = await asyncio.to_thread(_examples, spec, loaded)
        else:
            return NOT_TRIED
        trial = await _try_calls(islice(calls, 1) if is_simulator else calls, model)
    except InvalidInput as error:  # of a file of examples
        trial = Trial(error=error.message)
    if trial.error and is_guess:
        log.info("not tried, its inputs are not declared: model=%s version=%s", spec.name, spec.version)
        return NOT_TRIED
    if trial.error:
        log.warning("trial failed: model=%s version=%s error=%s", spec.name, spec.version, trial.error)
    return trial


async def _try_calls(calls: Iterator[Any], model: LoadedReplicas) -> Trial:
    limit_s = model.spec.trial_s
    end_s = time.monotonic() + limit_s
    error = ""
    for call in calls:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            break
        try:
            async with asyncio.timeout(None if model.blocks_event_loop else left_s):
                answer = await model.answer(call, is_trial=True)
        except TimeoutError:
            return Trial(error=error or f"no answer within {limit_s:g} s")
        except (NotReady, Overloaded):  # such as a model that calls one that is not loaded yet
            return NOT_TRIED
        except WorkerLost as lost:  # the example has crashed it: no other is tried
            return Trial(error=lost.message)
        except DragomanError as failure:
            error = error or _one_line(failure.message)
        except Exception as failure:
            error = error or _one_line(public_text(failure))
        else:
            return Trial(call.inputs if type(call) is Infer else None, outputs_of(answer))
    return Trial(error=error)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def outputs_of(answer: Any) -> Tensors | None:
    """Return the outputs of an answer, None if it has none."""
    return answer.outputs if isinstance(answer, Inference) else None


def distributions(outputs: Tensors) -> frozenset[str]:
    """Return the outputs whose values are probabilities: of two or more on the last axis, none negative, of sum 1."""
    return frozenset(name for name, tensor in outputs.items() if _is_distribution(tensor))


def _is_distribution(tensor: Tensor) -> bool:
    if tensor.datatype.kind != "float" or tensor.shape[-1:] in ((), (0,), (1,)) or not math.prod(tensor.shape):
        return False
    values = numpy_numbers(tensor)[..., :_MAX_CLASSES]
    return bool((values >= 0).all() and np.allclose(values.sum(axis=-1, dtype=np.float64), 1, atol=_TOLERANCE))


def _examples(spec: ModelSpec, loaded: Loaded) -> tuple[Iterator[Infer], bool]:
    """Return the calls of the file of examples, else of the model itself, else those made from its inputs; and whether
    these are guessed, since a datatype or shape is not declared."""
    if (file := OwnFiles(spec).examples()) is not None:
        try:
            return iter(read_requests(file)[:1]), False
        except InvalidInput as error:
            raise InvalidInput(f"{file.name}: {error.message}") from error
    if loaded.example is not None:
        return iter([Infer(loaded.example)]), False
    required = [tensor for tensor in loaded.signature.inputs if not tensor.optional]
    has_gaps = any(None in (tensor.datatype, tensor.shape) for tensor in required)
    return map(Infer, example_inputs(loaded.signature)), has_gaps
