"""Embeddings: the states of an encoder or a decoder, and the layers that make one vector of each text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dragoman.core.calls import Embed, Embedded
from dragoman.core.datatypes import FP32
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.huggingface.layers import (
    TOKENS,
    VECTOR,
    Features,
    Layer,
    Normalize,
    Pooling,
    build_layers,
    pooling_modes,
)
from dragoman.runtimes.huggingface.sentence_transformers import EncoderFiles
from dragoman.runtimes.huggingface.text_tokenizer import TextTokenizer

BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Row:
    """The tokens of a text with its prompt, and how many of them are the prompt's."""

    ids: Sequence[int]
    prompt: int = 0


class Embedder:
    """A transformer with its tokenizer, and the layers that the files of the folder or parameters name; answers Embed.

    Without files and parameters a decoder is pooled by its last token, which alone sees the whole text, an encoder by
    the mean; and the vectors have length 1. Raises ModelFailed for layers that do not make a vector.
    """

    def __init__(self, model: Any, tokenizer: Any, files: EncoderFiles, spec: ModelSpec) -> None:
        self._model, self._tokenizer, self._files = model, tokenizer, files
        self.is_causal = self._measure_causality()
        self._layers = self._choose_layers(spec)
        self._texts = TextTokenizer(tokenizer, truncates=spec.parameters.get("truncate") is True)
        self._prompts: dict[str, int] = {}  # number of tokens
        if self.is_causal:
            model.config.use_cache = False
        try:
            self.size = self(Embed(((0,),))).vectors.shape[1]
        except KeyError as error:
            raise ModelFailed(
                f"the modules of sentence-transformers make no vector: no module gives {error}"
            ) from error

    def details(self) -> Mapping[str, Any]:
        """Return what clients can choose, and how to compare vectors."""
        size = self._files.dimensions or self.size
        return {"dimensions": size, "prompts": sorted(self._files.prompts), "similarity": self._files.similarity}

    def __call__(self, call: Embed) -> Embedded:
        """Return the vectors in the order of the inputs.

        Raises InvalidInput if a text is longer than the model allows, or a prompt is unknown.
        """
        prompt = self._prompt(call.prompt_name)
        rows = [self._row(each, i, call, prompt) for i, each in enumerate(call.inputs)]
        # Padding follows the text, where a causal model does not see it, whatever the token.
        can_pad = self.is_causal or self._tokenizer.pad_token_id is not None
        size = BATCH_SIZE if can_pad else 1
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))  # similar lengths need little padding
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        found = np.concatenate([self._encode([rows[i] for i in batch]) for batch in batches])
        vectors = np.empty_like(found)
        vectors[order] = found
        return Embedded(Tensor(vectors, FP32), sum(len(row.ids) for row in rows))

    # --- layers ------------------------------------------------------------------------------------------------

    def _choose_layers(self, spec: ModelSpec) -> list[Layer]:
        """Return the layers of the files, changed by the parameters `pooling` and `normalize`."""
        names, normalize = spec.parameters.get("pooling"), spec.parameters.get("normalize")
        modes = None if names is None else pooling_modes(names)
        if names is not None and modes is None:
            raise ModelFailed(
                "parameter 'pooling': expected last, mean, cls, max, weightedmean, mean_sqrt_len_tokens, or a list of "
                f"them, got {names!r}"
            )
        if normalize is not None and not isinstance(normalize, bool):
            raise ModelFailed(f"parameter 'normalize': expected true or false, got {normalize!r}")
        layers = build_layers(self._files.modules, spec)
        if not layers:
            layers = [Pooling(modes or ("lasttoken" if self.is_causal else "mean",)), Normalize()]
        elif modes:
            layers = [replace(layer, modes=modes) if isinstance(layer, Pooling) else layer for layer in layers]
        if normalize is not None:
            layers = [layer for layer in layers if not isinstance(layer, Normalize)]
            layers += [Normalize()] if normalize else []
        return layers

    # --- tokens ------------------------------------------------------------------------------------------------

    def _prompt(self, name: str | None) -> str:
        prompts = self._files.prompts
        name = self._files.default_prompt if name is None else name
        if name and name not in prompts:
            known = ", ".join(sorted(prompts)) or "none: the model names no prompts"
            raise InvalidInput(f"prompt_name: expected one of {known}; got '{name[:64]}'")
        return prompts[name] if name else ""

    def _row(self, each: str | tuple[int, ...], index: int, call: Embed, prompt: str) -> _Row:
        if isinstance(each, str):
            ids: Sequence[int] = self._texts.encode((prompt + each,), call, f"input {index}")["input_ids"]
            row = _Row(ids, self._prompt_tokens(prompt))
            if not len(ids) > row.prompt:
                raise InvalidInput(f"input {index} has no tokens; expected at least 1")
            return row
        ids = self._texts.cut(each, call)
        size = self._model.config.get_text_config().vocab_size
        unknown = next((i for i in ids if i >= size), None)
        if unknown is not None:
            raise InvalidInput(f"input {index}: expected token ids below {size}, got {unknown}")
        limit = self._texts.max_tokens
        if not 0 < len(ids) <= limit:
            raise InvalidInput(f"input {index} has {len(ids)} tokens; the model takes 1 to {limit}")
        return _Row(ids)

    def _prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, without a special token at its end."""
        if not prompt:
            return 0
        if prompt not in self._prompts:
            ids = self._tokenizer(prompt, verbose=False)["input_ids"]
            self._prompts[prompt] = len(ids) - (bool(ids) and ids[-1] in self._tokenizer.all_special_ids)
        return self._prompts[prompt]

    # --- computing ---------------------------------------------------------------------------------------------

    def _encode(self, rows: Sequence[_Row]) -> Any:
        device = self._model.device
        longest = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), longest), self._tokenizer.pad_token_id or 0, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
            mask[i, : len(row.ids)] = 1
        prompts = torch.tensor([row.prompt for row in rows], device=device)
        with torch.inference_mode():
            features = Features({TOKENS: self._states(ids, mask)}, mask.to(device), prompts)
            for layer in self._layers:
                layer(features)
            vectors = features.values[VECTOR]
        return vectors[:, : self._files.dimensions].cpu().numpy()

    def _states(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        device = self._model.device
        output = self._model(input_ids=ids.to(device), attention_mask=mask.to(device))
        states: torch.Tensor = output.logits if self._files.task == "fill-mask" else output.last_hidden_state
        return states.float()

    def _measure_causality(self) -> bool:
        """Return whether the state of a token does not depend on the next one.

        Configurations do not show it: a decoder may have been changed to attend to both sides.
        """
        with torch.inference_mode():
            pairs = (torch.tensor([[0, following]]) for following in (1, 2))
            one, other = (self._states(pair, torch.ones_like(pair))[0] for pair in pairs)
            change = (one - other).abs().amax(1)
        return bool(change[0] <= 1e-5 * change[1])
