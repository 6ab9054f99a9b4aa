"""A continuous-batching pipeline of OpenVINO GenAI's in a thread of its own, and its tokens as asynchronous streams."""

import asyncio
import itertools
import logging
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed, WorkerLost
from dragoman.core.text import Sampling
from dragoman.generation.engine_thread import notify, start_thread
from dragoman.generation.external_engine import ExternalRequest, TokenChunk
from dragoman.generation.token_sampler import TokenChoice
from dragoman.runtimes.openvino_genai import sampling as openvino_sampling

log = logging.getLogger("dragoman.generation")


class OpenVinoTokens:
    """A `TokenEngine`. `make` makes the pipeline, in the thread that then calls all of it."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sequences: dict[_Sequence, Any] = {}
        self._numbers = itertools.count()
        self._closed = ""
        self._thread = start_thread(make, self._work, name)

    def refuse(self, sampling: Sampling) -> None:
        openvino_sampling.refuse(sampling)

    async def tokens(self, wanted: ExternalRequest) -> AsyncGenerator[TokenChunk, None]:
        if self._closed:
            raise WorkerLost(self._closed)
        sequence = _Sequence(wanted)
        self._commands.put(lambda: self._begin(sequence))
        try:
            if self._closed:  # in the meantime: the thread may have stopped
                raise WorkerLost(self._closed)
            has_ended = False
            while not has_ended:
                await sequence.updated.wait()
                sequence.updated.clear()
                has_ended = sequence.has_ended  # read first: tokens that came before the end are then complete
                if sequence.choices:
                    yield sequence.take_chunk()
                if sequence.error is not None:
                    raise sequence.error
        finally:
            self._commands.put(lambda: self._end(sequence))

    async def close(self) -> None:
        self._closed = "the text engine is stopped"
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- in the pipeline's thread ------------------------------------------------------------------------

    def _work(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        while self._run_commands():
            try:
                self._pipeline.step()
                self._distribute()
            except Exception as error:
                self._recover(error)
        self._fail_all(WorkerLost("the text engine is stopped"))
        del self._pipeline

    def _run_commands(self) -> bool:
        """Run the queued commands, and wait for one if there is nothing else to do; return False at the end."""
        while not (self._pipeline.has_non_finished_requests() and self._commands.empty()):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _begin(self, sequence: "_Sequence") -> None:
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        try:
            config = GenerationConfig()
            for name, value in openvino_sampling.fields(sequence.wanted).items():
                setattr(config, name, value)
            tokens = Tensor(np.array([sequence.wanted.asked.tokens], np.int64))
            self._sequences[sequence] = self._pipeline.add_request(next(self._numbers), tokens, config)
        except Exception as error:
            sequence.end(InvalidInput(f"OpenVINO refuses it: {_error_line(error)}"))

    def _end(self, sequence: "_Sequence") -> None:
        handle = self._sequences.pop(sequence, None)
        if handle is not None:
            handle.cancel()

    def _distribute(self) -> None:
        """Pass new tokens to their sequences."""
        from openvino_genai import GenerationStatus

        updated: dict[asyncio.AbstractEventLoop, list[_Sequence]] = {}
        for sequence, handle in list(self._sequences.items()):
            while handle.can_read():
                for output in handle.read().values():
                    sequence.take(output.generated_ids, output.generated_log_probs)
                updated.setdefault(sequence.loop, []).append(sequence)
            status = handle.get_status()
            if status != GenerationStatus.RUNNING:
                del self._sequences[sequence]
                lost = None if status == GenerationStatus.FINISHED else ModelFailed(f"generation failed: {status.name}")
                sequence.end(lost)
        for loop, sequences in updated.items():
            notify(loop, sequences)

    def _recover(self, error: Exception) -> None:
        """Fail all sequences after a failed step: the one at fault is unknown."""
        log.exception("OpenVINO failed in a step; its sequences end")
        self._fail_all(ModelFailed(f"generation failed: {_error_line(error)}"))
        try:
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
        except Exception:
            log.exception("OpenVINO does not recover; the model must be loaded anew")
            self._closed = "OpenVINO has failed; the model must be loaded anew"
            self._commands.put(None)

    def _fail_all(self, error: DragomanError) -> None:
        opened, self._sequences = self._sequences, {}
        for sequence, handle in opened.items():
            handle.cancel()
            sequence.end(error)


class _Sequence:
    """The tokens of one sequence: written by the thread of the pipeline, read on the event loop."""

    def __init__(self, wanted: ExternalRequest) -> None:
        self.wanted = wanted
        self.loop = asyncio.get_running_loop()
        self.updated = asyncio.Event()
        self.choices: deque[TokenChoice] = deque()
        self.has_ended = False
        self.error: DragomanError | None = None

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.choices.extend(TokenChoice(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True))

    def take_chunk(self) -> TokenChunk:
        return TokenChunk([self.choices.popleft() for _ in range(len(self.choices))])

    def end(self, error: DragomanError | None) -> None:
        self.error = error
        self.has_ended = True
        notify(self.loop, [self])


def _error_line(error: Exception) -> str:
    """Return the message of an error without locations in the sources of OpenVINO."""
    lines = [line for line in str(error).splitlines() if line and "failed at /" not in line]
    return lines[-1] if lines else type(error).__name__
