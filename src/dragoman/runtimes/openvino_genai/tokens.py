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
        self._open: dict[_Text, Any] = {}
        self._numbers = itertools.count()
        self._closed = ""
        self._thread = start_thread(make, self._work, name)

    def refuse(self, sampling: Sampling) -> None:
        openvino_sampling.refuse(sampling)

    async def tokens(self, wanted: ExternalRequest) -> AsyncGenerator[TokenChunk, None]:
        if self._closed:
            raise WorkerLost(self._closed)
        text = _Text(wanted)
        self._commands.put(lambda: self._begin(text))
        try:
            if self._closed:  # meanwhile: nobody may be there to take the order
                raise WorkerLost(self._closed)
            over = False
            while not over:
                await text.updated.wait()
                text.updated.clear()
                over = text.over  # looked at first: what came before the end is there then
                if text.come:
                    yield text.taken()
                if text.error is not None:
                    raise text.error
        finally:
            self._commands.put(lambda: self._end(text))

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
                self._deal()
            except Exception as error:
                self._broken(error)
        self._abandon(WorkerLost("the text engine is stopped"))
        del self._pipeline

    def _run_commands(self) -> bool:
        """Do what was ordered, waiting for an order where there is nothing else to do; False at the end."""
        while not (self._pipeline.has_non_finished_requests() and self._commands.empty()):
            order = self._commands.get()
            if order is None:
                return False
            order()
        return True

    def _begin(self, text: "_Text") -> None:
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        try:
            config = GenerationConfig()
            for name, value in openvino_sampling.fields(text.wanted).items():
                setattr(config, name, value)
            tokens = Tensor(np.array([text.wanted.asked.tokens], np.int64))
            self._open[text] = self._pipeline.add_request(next(self._numbers), tokens, config)
        except Exception as error:
            text.end(InvalidInput(f"OpenVINO refuses it: {_line(error)}"))

    def _end(self, text: "_Text") -> None:
        handle = self._open.pop(text, None)
        if handle is not None:
            handle.cancel()

    def _deal(self) -> None:
        """Give each text what has come of it."""
        from openvino_genai import GenerationStatus

        mark_updated: dict[asyncio.AbstractEventLoop, list[_Text]] = {}
        for text, handle in list(self._open.items()):
            while handle.can_read():
                for found in handle.read().values():
                    text.take(found.generated_ids, found.generated_log_probs)
                mark_updated.setdefault(text.loop, []).append(text)
            status = handle.get_status()
            if status != GenerationStatus.RUNNING:
                del self._open[text]
                lost = None if status == GenerationStatus.FINISHED else ModelFailed(f"generation failed: {status.name}")
                text.end(lost)
        for loop, texts in mark_updated.items():
            notify(loop, texts)

    def _broken(self, error: Exception) -> None:
        """A step has failed, and nobody knows for which text: all of them end, and the next ones begin anew."""
        log.exception("OpenVINO failed in a step; its texts end")
        self._abandon(ModelFailed(f"generation failed: {_line(error)}"))
        try:
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
        except Exception:
            log.exception("OpenVINO does not recover; the model must be loaded anew")
            self._closed = "OpenVINO has failed; the model must be loaded anew"
            self._commands.put(None)

    def _abandon(self, error: DragomanError) -> None:
        opened, self._open = self._open, {}
        for text, handle in opened.items():
            handle.cancel()
            text.end(error)


class _Text:
    """What has come for one text: written by the pipeline's thread, read on the loop."""

    def __init__(self, wanted: ExternalRequest) -> None:
        self.wanted = wanted
        self.loop = asyncio.get_running_loop()
        self.updated = asyncio.Event()
        self.come: deque[TokenChoice] = deque()
        self.over = False
        self.error: DragomanError | None = None

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.come.extend(TokenChoice(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True))

    def taken(self) -> TokenChunk:
        return TokenChunk([self.come.popleft() for _ in range(len(self.come))])

    def end(self, error: DragomanError | None) -> None:
        self.error = error
        self.over = True
        notify(self.loop, [self])


def _line(error: Exception) -> str:
    """What an error says, without where in OpenVINO's sources it came from."""
    lines = [line for line in str(error).splitlines() if line and "failed at /" not in line]
    return lines[-1] if lines else type(error).__name__
