"""Tiny random vision-language models for tests, saved as Hugging Face folders with their processors."""

import base64
import importlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# The image in a prompt of each type of model, and the special tokens of its tokenizer: the first stands for an image.
KINDS = {
    "llava": ("<image>", ["<image>"]),
    "gemma3": ("<start_of_image>", ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]),
    "idefics3": (
        "<image>",
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        + [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)],
    ),
    "qwen2_5_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    ),
}
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}"
    "{{ p['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
# For templates that know texts alone: the placeholder becomes a part of the text.
PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}assistant:"
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_SQUARE = {"height": 28, "width": 28}


def save_model(folder: Path, kind: str = "llava", template: str = _TEMPLATE) -> Path:
    """Save a random model of a kind and its processor in the folder, which is returned."""
    torch.manual_seed(0)
    image, special = KINDS[kind]
    names = {"llava": "Llava", "gemma3": "Gemma3", "idefics3": "Idefics3", "qwen2_5_vl": "Qwen2_5_VL"}
    config = _config(kind, getattr(transformers, f"{names[kind]}Config"))
    model = getattr(transformers, f"{names[kind]}ForConditionalGeneration")(config)
    with torch.no_grad():  # so that the image matters beside the text
        for weights in model.parameters():
            weights.mul_(2.0)
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(special),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special,
        extra_special_tokens=dict(zip(("image_token", "boi_token", "eoi_token"), special, strict=False)),
    )
    tokenizer.chat_template = template.replace("IMAGE", image)
    tokenizer.save_pretrained(folder)
    _image_processor(kind).save_pretrained(folder)
    options: dict[str, dict[str, Any]] = {
        "llava": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "gemma3": {"image_seq_length": 4},
        "idefics3": {"image_seq_len": 1},
    }
    file = folder / "processor_config.json"
    file.write_text(json.dumps({"processor_class": f"{names[kind]}Processor", **options.get(kind, {})}))
    return folder


def _config(kind: str, config: Any) -> Any:
    match kind:
        case "llava":
            texts = transformers.LlamaConfig(**_TEXT).to_dict()
            clip = transformers.CLIPVisionConfig(**_VISION, projection_dim=32).to_dict()
            return config(vision_config=clip, text_config=texts, image_token_index=3)
        case "gemma3":
            text = {**_TEXT, "sliding_window": 16, "num_hidden_layers": 7}
            indices = {"image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5}
            return config(text_config=text, vision_config=_VISION, mm_tokens_per_image=4, **indices)
        case "idefics3":
            text = {**_TEXT, "model_type": "llama"}
            return config(text_config=text, vision_config=_VISION, scale_factor=2, image_token_id=3)
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 14}
    vision |= {"out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 56}
    ids = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    return config(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, **ids)


def _image_processor(kind: str) -> Any:
    table: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llava": ("llava", "Llava", {"size": _SQUARE, "crop_size": _SQUARE}),
        "gemma3": ("gemma3", "Gemma3", {"size": _SQUARE}),
        "idefics3": ("idefics3", "Idefics3", {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}),
        "qwen2_5_vl": ("qwen2_vl", "Qwen2VL", {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16}),
    }
    base, name, options = table[kind]
    module = importlib.import_module(f"transformers.models.{base}.image_processing_pil_{base}")
    return getattr(module, f"{name}ImageProcessorPil")(**options)


def _tokenizer(special: Sequence[str]) -> Tokenizer:
    words = ["<pad>", "<s>", "</s>", *special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def image(seed: int, width: int = 50, height: int = 40) -> Any:
    """Return an image with random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def file_of(picture: Any, file_format: str = "PNG", **options: Any) -> str:
    """Return the file of an image in base64."""
    file = io.BytesIO()
    picture.save(file, file_format, **options)
    return base64.b64encode(file.getvalue()).decode()


class VisionReference:
    """A folder loaded by transformers: model, image processor and tokenizer."""

    def __init__(self, folder: Path, processor: Any) -> None:
        self.processor = processor
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def generate(self, messages: Sequence[Any], pictures: Sequence[Any], count: int) -> tuple[int, list[int]]:
        """Return the number of tokens of the prompt, and the new tokens, greedily."""
        text = self.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [list(pictures)] if pictures else None
        inputs = self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            tokens = self.model.generate(**inputs, **options)[0]
        length = inputs["input_ids"].shape[1]
        return length, tokens[length:].tolist()
