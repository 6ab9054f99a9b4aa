"""General path: run any model of transformers with its own code and its own cache, one sequence at a time."""

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dragoman.core.errors import ModelFailed
from dragoman_text.generation.adapters import AdapterLayers
from dragoman_text.generation.job import BatchRow, Sequence
from dragoman_text.generation.pretrained import TOLERANCE, Pretrained
from dragoman_text.generation.rounding import check_tokens
from dragoman_text.generation.threads import MAX_THREADS, AdaptiveThreads, fastest_thread_count
from dragoman_text.generation.vision import NO_FEATURES, Features, VisionProcessor

log = logging.getLogger("dragoman.generation")

# Names of the cache in the output of a model, and of the argument that takes it.
_CACHES: Mapping[str, str] = {
    "past_key_values": "past_key_values",
    "cache_params": "cache_params",
    "state": "state",
    "mems": "past_key_values",
}
# Arguments with one element for each token so far, and how the next element follows from the last one.
_BY_TOKEN: Mapping[str, int] = {
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "position_ids": 1,
    "decoder_position_ids": 1,
}
_CHECK_TOKENS, _CHECK_STEPS = 12, 4


@dataclass(eq=False, slots=True)
class SequenceState:
    """State of one sequence: its computed `tokens`, and the arguments of the next forward pass with the cache.

    ids: tokens of the decoder. arguments: None if they are unknown because a forward pass failed.
    """

    tokens: list[int]
    prompt: int
    ids: torch.Tensor
    arguments: dict[str, Any] | None = None

    def fork(self) -> "SequenceState":
        """Return an independent copy; the output of an encoder is shared, as it does not change."""
        arguments = self.arguments
        if arguments is not None:
            shared = {"encoder_outputs": arguments["encoder_outputs"]} if "encoder_outputs" in arguments else {}
            rest = {name: value for name, value in arguments.items() if name not in shared}
            arguments = {**copy.deepcopy(rest), **shared}
        return SequenceState(list(self.tokens), self.prompt, self.ids, arguments)


@dataclass(slots=True)
class GeneralMemory:
    """Memory of the general path: the states of sequences by slot, within `capacity` bytes.

    fixed: bytes of a sequence without tokens.
    each: bytes of a token.
    budget: number of tokens of all sequences together.
    """

    capacity: int
    fixed: int
    each: int
    budget: int
    of: dict[int, SequenceState] = field(default_factory=dict)

    @property
    def cache(self) -> "GeneralMemory":
        return self

    @property
    def allocated_tokens(self) -> int:
        return sum(len(state.tokens) for state in self.of.values())

    def fits(self, slots: int, length: int) -> bool:
        return slots * (self.fixed + length * self.each) <= self.capacity

    def reserve(self, slots: int, length: int) -> None:
        """Do nothing: the models' caches grow by themselves."""

    def release(self) -> None:
        self.of.clear()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the state of a slot to another."""
        if source in self.of:
            self.of[target] = self.of[source].fork()

    def clear(self, slot: int, length: int) -> None:
        self.of.pop(slot, None)

    def gather(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy several states at once; sources are read before targets are written."""
        if sources == targets:
            return
        states = [self.of[source] for source in sources]
        copies = [state.fork() if state in states[:i] else state for i, state in enumerate(states)]
        self.of.update(zip(targets, copies, strict=True))

    def load_prefix(self, sequence: Sequence) -> int:
        """Return 0: prompts are computed whole."""
        return 0

    def store_prefix(self, sequence: Sequence) -> None:
        """Do nothing."""

    def clear_prefixes(self) -> None:
        """Do nothing."""


class GeneralRunner:
    """A model of any architecture that transformers can generate with, used by one thread.

    At load its logits are compared with those of `generate`. If they differ with the model's own cache, each step
    computes
    all tokens again. Raises ModelFailed if they differ then, too.
    """

    native = graphs = False
    batch_invariant = True  # one sequence after the other
    prefill_chunk: int | None = 1 << 30  # prompts are computed whole: not all caches can be continued by several tokens

    def __init__(self, pretrained: Pretrained, vision: VisionProcessor | None = None) -> None:
        self.model, self.config = pretrained.model, pretrained.config
        self.dtype, self.device = pretrained.dtype, pretrained.device
        self.is_encoder_decoder = pretrained.is_encoder_decoder
        self._adaptive_threads: AdaptiveThreads | None = None
        self.adapters = AdapterLayers(self.model, None, self.dtype, self.device, packed=False)
        self._forced_bos: int | None = None
        self._caches = True
        self.vision = vision
        sizes = self._check()
        self.fixed_bytes, self.bytes_per_token = sizes
        self._forced_bos = pretrained.forced_bos

    @property
    def forward(self) -> str:
        """How tokens are computed: "cache" with the model's own cache, or "no cache"."""
        return "cache" if self._caches else "no cache"

    def run(self, cache: GeneralMemory, rows: Rows[BatchRow]) -> torch.Tensor:
        """Compute the rows one after the other; return the wanted logits in order, [wanted, vocabulary], FP32."""
        with torch.inference_mode(), self._adaptive_threads or nullcontext():
            return torch.cat([self._compute(cache, row) for row in rows])

    def set_threads(self, count: int) -> int:
        """Set the number of threads; 0 for the fastest number. Return the number."""
        threads = count or fastest_thread_count(self._measure_s, MAX_THREADS)
        torch.set_num_threads(threads)
        self._adaptive_threads = None if count or threads == 1 else AdaptiveThreads(threads)
        return threads

    def _measure_s(self, threads: int) -> float:
        torch.set_num_threads(threads)
        states, tokens = GeneralMemory(1 << 62, 0, 0, 1 << 30), self._tokens()
        begin_s = time.perf_counter()
        self.run(states, [BatchRow(0, 0, tokens, prompt=len(tokens))])
        self.run(states, [BatchRow(0, len(tokens), tokens[:1], prompt=len(tokens))])
        return time.perf_counter() - begin_s

    # --- forward pass ------------------------------------------------------------------------------------

    def _compute(self, states: GeneralMemory, row: BatchRow) -> torch.Tensor:
        self.adapters.assign([row.adapter])
        state = states.of.get(row.slot)
        if row.start and state is not None and state.arguments is not None and len(state.tokens) == row.start:
            state.ids = torch.cat((state.ids, self._tensor(row.tokens)), 1)
            count: int | None = len(row.tokens)
            is_first = False
        else:  # a new sequence, or one whose last step failed
            computed = state.tokens[: row.start] if state is not None and row.start else []
            if len(computed) != row.start:
                raise ModelFailed("generation failed: the state of the sequence is lost")
            tokens = [*computed, *row.tokens]
            state = states.of[row.slot] = self._begin(tokens, row.prompt or len(tokens), row.features)
            state.tokens, count, is_first = computed, None, True
        arguments, state.arguments = state.arguments, None
        assert arguments is not None
        logits = self._forward(state.ids, arguments, count if self._caches else None, row.wanted, is_first=is_first)
        if self._caches:  # they are in the cache; copies of the sequence need not have them
            for name in row.features:
                if name.startswith("pixel"):
                    arguments.pop(name, None)
        state.arguments, state.tokens = arguments, [*state.tokens, *row.tokens]
        return logits

    def _begin(self, tokens: list[int], prompt: int, features: Features) -> SequenceState:
        """Return the state before the first forward pass; an encoder is run on the prompt."""
        source = self._tensor(tokens[:prompt] if self.is_encoder_decoder else tokens)
        ids, arguments = self.model.generate(
            source,
            attention_mask=torch.ones_like(source),
            **self._arguments_of(features, source.shape[1]),
            custom_generate=_prepared_arguments,
            max_new_tokens=1,
            do_sample=False,
            use_cache=self._caches,
        )
        if self.is_encoder_decoder:
            forced = [] if self._forced_bos is None else [self._forced_bos]
            ids = torch.cat((ids, self._tensor([*forced, *tokens[prompt:]])), 1)
        return SequenceState([], prompt, ids, arguments)

    def _forward(
        self, ids: torch.Tensor, arguments: dict[str, Any], count: int | None, wanted: int, *, is_first: bool
    ) -> torch.Tensor:
        """Compute the last `count` tokens, None for all; update the arguments for the next one."""
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=is_first, **arguments
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = max(1, wanted)
        output = self.model(**inputs, return_dict=True)
        if self._caches:
            for name, argument in _CACHES.items():
                value = getattr(output, name, None)
                if value is not None:
                    arguments[argument] = value
        for name in _BY_TOKEN:
            value = arguments.get(name)
            if value is not None and not (self.is_encoder_decoder and name == "attention_mask"):
                arguments[name] = torch.cat((value, _next_element(name, value)), -1)
        logits: torch.Tensor = output.logits[0, output.logits.shape[1] - wanted :]
        return logits.to(torch.float32, copy=True)

    def _arguments_of(self, features: Features, length: int) -> dict[str, Any]:
        """Return features on the device and in the dtype of the model, those by token extended to all tokens."""
        arguments = dict(features)
        for name, value in features.items():
            if isinstance(value, torch.Tensor):
                arguments[name] = value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)
            if name in _BY_TOKEN:
                more = _next_element(name, arguments[name]).expand(-1, length - value.shape[-1])
                arguments[name] = torch.cat((arguments[name], more), -1)
        return arguments

    def _tensor(self, tokens: Rows[int]) -> torch.Tensor:
        return torch.tensor([[*tokens]], dtype=torch.long, device=self.device)

    # --- check -------------------------------------------------------------------------------------------

    def _tokens(self) -> list[int]:
        return check_tokens(_CHECK_TOKENS, self.config.vocab_size)

    def _check(self) -> tuple[int, int]:
        """Compare logits with those of `generate`; return the bytes of a sequence without tokens, and of each token."""
        samples: list[tuple[list[int], Features]] = [(self._tokens(), NO_FEATURES)]
        if self.vision is not None:
            samples = [self.vision.sample(), *samples]
        problem = ""
        for self._caches in (True, False):
            differences = []
            try:
                for prompt, features in samples:
                    tokens, expected = self._reference(prompt, features)
                    logits, sizes = self._step_by_step(tokens, len(expected), features)
                    differences.append(float((logits - expected).abs().max() / expected.abs().max()))
            except Exception:  # code of any model
                log.warning("model type %s, cache=%s: it raised", self.config.model_type, self._caches, exc_info=True)
                problem = "its own code in transformers failed; the log has the details"
                continue
            wrong = [each for each in differences if not each < TOLERANCE[self.dtype]]  # also true for NaN
            if not wrong:
                return sizes
            problem = f"its logits differ by {wrong[0]:.2g} from those of transformers"
        raise ModelFailed(f"models of the type '{self.config.model_type}' cannot generate here: {problem}")

    def _reference(self, prompt: list[int], features: Features) -> tuple[list[int], torch.Tensor]:
        """Return tokens of a prompt with a greedy completion by transformers, and the logits of its steps."""
        source = self._tensor(prompt)
        output = self.model.generate(
            source,
            attention_mask=torch.ones_like(source),
            **self._arguments_of(features, source.shape[1]),
            max_new_tokens=_CHECK_STEPS,
            min_new_tokens=_CHECK_STEPS,
            do_sample=False,
            use_cache=self._caches,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = output.sequences[0, -len(output.logits) :].tolist()
        return [*prompt, *new], torch.cat(output.logits)

    def _step_by_step(self, tokens: list[int], steps: int, features: Features) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the logits of each step, and the bytes of a sequence without tokens, and of each token.

        Another sequence advances in the same steps, so that a model that keeps states outside of its cache is found.
        """
        prompt = len(tokens) - steps
        states = GeneralMemory(1 << 62, 0, 0, 1 << 30)
        text = self._tokens()
        other = BatchRow(1, 0, text[2:], prompt=len(text) - 2)
        first = BatchRow(0, 0, tokens[:prompt], prompt=prompt, features=features)
        logits = [self.run(states, [first, other])[:1]]
        before = _bytes(states.of[0].arguments)
        for position in range(prompt, prompt + steps - 1):
            rows = [
                BatchRow(0, position, [tokens[position]], prompt=prompt),
                BatchRow(1, len(text) - 2 + position - prompt, [text[position - prompt]], prompt=len(text) - 2),
            ]
            logits += [self.run(states, rows)[:1]]
        after = _bytes(states.of[0].arguments)
        each = max(1, (after - before) // max(1, steps - 1))
        if self.is_encoder_decoder:  # the prompt's keys and values of each layer are as large as those of the text
            each = max(each, after // len(tokens))
        return torch.cat(logits), (max(0, before - prompt * each), each)


def _next_element(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the element of an argument by token for the token after the last one."""
    last = value[..., -1:]
    return torch.zeros_like(last) if name == "mm_token_type_ids" else last + _BY_TOKEN[name]


def _prepared_arguments(
    model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **arguments: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Decoding loop for `generate` that only returns its arguments."""
    return input_ids, arguments


def _bytes(value: Any) -> int:
    """Return the size of all tensors in arguments."""
    return sum(each.nbytes for each in _tensors(value, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from _tensors(part, seen)
