"""Calls that change the text engine of a model: its LoRA adapters and its prefix cache."""

import msgspec

from dragoman.core.calls import ModelCall


class LoadAdapter(msgspec.Struct, ModelCall[None], frozen=True):
    """Load a LoRA adapter from a path in the model's folder of adapters; it may replace one, and be kept in memory."""

    name: str
    path: str
    replaces: bool = False
    pinned: bool = False


class UnloadAdapter(msgspec.Struct, ModelCall[None], frozen=True):
    """Unload a LoRA adapter of the model; calls that use it are completed."""

    name: str


class ResetPrefixCache(msgspec.Struct, ModelCall[None], frozen=True):
    """Forget the computed prefixes of prompts; calls in progress continue."""
