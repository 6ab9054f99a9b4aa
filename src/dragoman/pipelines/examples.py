"""A small row of each kind, for the call that a model answers when it is loaded."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dragoman.pipelines.tasks import GENERATION, PipelineTask

_SIDE = 64  # pixels of an image
_LABELS = ["a", "b"]


def example_call(task: PipelineTask, model: Any, parts: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return one row of a task as its pipeline takes it, and options that keep generated texts short."""
    options: dict[str, Any] = {spec.name: _LABELS for spec in task.shared if not spec.optional}
    if "max_new_tokens" in task.options and model.can_generate():
        options["max_new_tokens"] = 2
        if "num_beams" in task.options and task.options.keys() >= GENERATION.keys():
            options["num_beams"] = 1
    return [_row(task, model, parts)], options


def _row(task: PipelineTask, model: Any, parts: Mapping[str, Any]) -> Any:
    match task.kind:
        case "image":
            return _image(0)
        case "image pair":
            return [_image(0), _image(1)]
        case "document":
            texts = {"question": "a", "word_boxes": [("a", [0, 0, 500, 500]), ("b", [500, 0, 1000, 500])]}
            return {"image": _image(0), **{spec.name: texts[spec.name] for spec in task.also if spec.name in texts}}
        case "video":
            count: int = getattr(model.config, "num_frames", 0) or getattr(model.config, "frames_per_clip", 16)
            return np.stack([np.asarray(_image(i)) for i in range(count)])
        case "audio":
            rate = parts["feature_extractor"].sampling_rate
            return (np.random.default_rng(0).standard_normal(rate) * 0.1).astype(np.float32)
        case "question":
            return "a", "a b"
        case "table":
            return {"query": "a", "table": {"a": ["1", "2"], "b": ["3", "4"]}}
        case "json":
            return {"state": "a", "questions": {"q": {"type": "noul", "instructions": "a"}}}
    return f"a {parts['tokenizer'].mask_token}" if task.name == "fill-mask" else "a b"


def _image(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3)).astype(np.uint8))
