"""The table of tasks: classes of transformers, inputs, options and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dragoman.core.datatypes import BYTES, DATATYPES, FP32, INT64
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Parameters

# What an option of a call has to be: of a type, or one of some words. `int` is an integer from 1.
Kind = type | tuple[str | bool, ...]
_FUNCTIONS: Kind = ("sigmoid", "softmax", "none")
_AGGREGATIONS: Kind = ("none", "simple", "first", "average", "max")
# Options of `generate` that a request may set: they are numbers and flags, and name no files or code.
GENERATION: Mapping[str, Kind] = {
    **dict.fromkeys(("max_new_tokens", "max_length", "num_beams", "num_return_sequences", "top_k"), int),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size"), int),
    **dict.fromkeys(("temperature", "top_p", "length_penalty", "repetition_penalty"), float),
    **dict.fromkeys(("do_sample", "early_stopping"), bool),
}

# --- inputs ------------------------------------------------------------------------------------------------------

# Names of the first input of a task that clients use in addition to the one in the metadata.
ALIASES = ("args", "array_inputs", "inputs", "text_inputs")
_UINT8 = DATATYPES["UINT8"]
_TEXTS = (TensorSpec("args", BYTES, (-1,), optional=True),)
_IMAGES = (
    TensorSpec("inputs", BYTES, (-1,), optional=True),
    TensorSpec("pixels", _UINT8, (-1, -1, -1, 3), optional=True),
)
_PAIRS = (
    TensorSpec("inputs", BYTES, (-1, 2), optional=True),
    TensorSpec("pixels", _UINT8, (-1, 2, -1, -1, 3), optional=True),
)
_AUDIO = (
    TensorSpec("inputs", BYTES, (-1,), optional=True),
    TensorSpec("samples", FP32, (-1, -1), optional=True),
)
_VIDEOS = (TensorSpec("frames", _UINT8, (-1, -1, -1, -1, 3)),)
_LABELS = TensorSpec("candidate_labels", BYTES, (-1,))


def _also(name: str, *, optional: bool = False) -> TensorSpec:
    """An input of texts beside the first, one for each row."""
    return TensorSpec(name, BYTES, (-1,), optional=optional)


# --- tasks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTask:
    """A task of pipelines.

    autos: classes of transformers that load its models, in order; architectures: models that they do not name.
    parts: what a pipeline needs beside the model: tokenizer, image_processor, feature_extractor or processor; with "?"
    if it can do without.
    kind: what a row is: text, image, audio, video, image pair, question, table, document or json.
    inputs: the first input of a row, in one of several forms, then further ones of a row.
    shared: inputs for all rows, each a list of texts.
    options: parameters of a request. arrays: outputs that are computed on request.
    joins: rows may be computed together.
    elsewhere: what serves the task instead of the runtime "huggingface"; only MLServer's folders have it then.
    """

    name: str
    autos: tuple[str, ...]
    kind: str
    parts: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    also: tuple[TensorSpec, ...] = ()
    shared: tuple[TensorSpec, ...] = ()
    options: Mapping[str, Kind] = field(default_factory=dict)
    arrays: tuple[TensorSpec, ...] = ()
    architectures: tuple[str, ...] = ()
    joins: bool = False
    elsewhere: str = ""

    @property
    def batched(self) -> bool:
        """Whether the calls of several clients may be computed together."""
        return self.joins and not self.shared and not self.arrays


def _texts(name: str, *autos: str, **values: Any) -> PipelineTask:
    return PipelineTask(name=name, autos=autos, kind="text", parts=("tokenizer",), inputs=_TEXTS, **values)


def _images(name: str, *autos: str, **values: Any) -> PipelineTask:
    values = {"kind": "image", "parts": ("image_processor",), "inputs": _IMAGES, **values}
    return PipelineTask(name=name, autos=autos, **values)


def _audio(name: str, *autos: str, **values: Any) -> PipelineTask:
    values = {"parts": ("feature_extractor",), **values}
    return PipelineTask(name=name, autos=autos, kind="audio", inputs=_AUDIO, **values)


_GENERATION = 'text generation has a runtime of its own, runtime = "llm"'
_CLASSES: Mapping[str, Kind] = {"top_k": int, "function_to_apply": _FUNCTIONS}
_TEMPLATE: Mapping[str, Kind] = {"hypothesis_template": str}
_FEATURES = (
    TensorSpec("features", FP32, (-1, -1, -1), optional=True),
    TensorSpec("attention_mask", INT64, (-1, -1), optional=True),
)

TASKS: Mapping[str, PipelineTask] = {
    task.name: task
    for task in (
        _texts(
            "text-classification",
            "AutoModelForSequenceClassification",
            also=(_also("text_pair", optional=True),),
            options={**_CLASSES, "truncation": bool},
            joins=True,
        ),
        _texts(
            "token-classification",
            "AutoModelForTokenClassification",
            options={"aggregation_strategy": _AGGREGATIONS, "stride": int},
            joins=True,
        ),
        PipelineTask(
            name="question-answering",
            autos=("AutoModelForQuestionAnswering",),
            kind="question",
            parts=("tokenizer",),
            inputs=(TensorSpec("question", BYTES, (-1,)),),
            also=(_also("context"),),
            options={"top_k": int, "max_answer_len": int, "handle_impossible_answer": bool, "align_to_words": bool},
            joins=True,
        ),
        _texts(
            "fill-mask",
            "AutoModelForMaskedLM",
            shared=(TensorSpec("targets", BYTES, (-1,), optional=True),),
            options={"top_k": int, "truncation": bool},
        ),
        _texts(
            "zero-shot-classification",
            "AutoModelForSequenceClassification",
            shared=(_LABELS,),
            options={**_TEMPLATE, "multi_label": bool},
        ),
        _texts(
            "translation",
            "AutoModelForSeq2SeqLM",
            options={**GENERATION, "truncation": bool, "src_lang": str, "tgt_lang": str},
        ),
        _texts("summarization", "AutoModelForSeq2SeqLM", options={**GENERATION, "truncation": bool}),
        _texts("text2text-generation", "AutoModelForSeq2SeqLM", options={**GENERATION, "truncation": bool}),
        PipelineTask(
            name="table-question-answering",
            autos=("AutoModelForTableQuestionAnswering",),
            kind="table",
            parts=("tokenizer",),
            inputs=(TensorSpec("query", BYTES, (-1,)),),
            also=(_also("table"),),
            options={"sequential": bool, "truncation": bool},
        ),
        _images("image-classification", "AutoModelForImageClassification", options=_CLASSES, joins=True),
        _images("object-detection", "AutoModelForObjectDetection", options={"threshold": float}),
        _images(
            "image-segmentation",
            "AutoModelForImageSegmentation",
            "AutoModelForSemanticSegmentation",
            "AutoModelForUniversalSegmentation",
            "AutoModelForInstanceSegmentation",
            options={
                "subtask": ("panoptic", "instance", "semantic"),
                **dict.fromkeys(("threshold", "mask_threshold", "overlap_mask_area_threshold"), float),
            },
        ),
        _images(
            "depth-estimation",
            "AutoModelForDepthEstimation",
            arrays=(TensorSpec("predicted_depth", FP32, (-1, -1, -1), optional=True),),
        ),
        _images(
            "mask-generation",
            "AutoModelForMaskGeneration",
            options={
                **dict.fromkeys(("points_per_batch", "points_per_crop", "crop_n_points_downscale_factor"), int),
                **dict.fromkeys(("pred_iou_thresh", "stability_score_thresh", "mask_threshold"), float),
                **dict.fromkeys(("crops_nms_thresh", "crop_overlap_ratio"), float),
                **dict.fromkeys(("output_rle_mask", "output_bboxes_mask"), bool),
            },
        ),
        _images(
            "keypoint-matching",
            "AutoModelForKeypointMatching",
            kind="image pair",
            inputs=_PAIRS,
            options={"threshold": float},
        ),
        _images(
            "zero-shot-image-classification",
            "AutoModelForZeroShotImageClassification",
            parts=("image_processor", "tokenizer"),
            shared=(_LABELS,),
            options=_TEMPLATE,
        ),
        _images(
            "zero-shot-object-detection",
            "AutoModelForZeroShotObjectDetection",
            parts=("image_processor", "tokenizer"),
            shared=(_LABELS,),
            options={"threshold": float, "top_k": int},
        ),
        _images(
            "visual-question-answering",
            "AutoModelForVisualQuestionAnswering",
            kind="document",
            parts=("image_processor", "tokenizer"),
            also=(_also("question"),),
            options={"top_k": int, "max_new_tokens": int},
        ),
        _images(
            "document-question-answering",
            "AutoModelForDocumentQuestionAnswering",
            kind="document",
            parts=("image_processor?", "tokenizer"),
            also=(_also("question"), _also("word_boxes", optional=True)),
            options={
                **dict.fromkeys(("top_k", "max_answer_len", "max_question_len", "max_seq_len", "doc_stride"), int),
                "handle_impossible_answer": bool,
            },
        ),
        _images(
            "image-to-text",
            "AutoModelForImageTextToText",
            "AutoModelForVision2Seq",
            kind="document",
            parts=("image_processor", "tokenizer", "processor?"),
            also=(_also("text", optional=True),),
            options=GENERATION,
        ),
        PipelineTask(
            name="video-classification",
            autos=("AutoModelForVideoClassification",),
            kind="video",
            parts=("image_processor?", "video_processor?"),
            inputs=_VIDEOS,
            options=_CLASSES,
        ),
        _audio("audio-classification", "AutoModelForAudioClassification", options=_CLASSES),
        _audio(
            "automatic-speech-recognition",
            "AutoModelForCTC",
            "AutoModelForTDT",
            "AutoModelForSpeechSeq2Seq",
            parts=("feature_extractor", "tokenizer"),
            options={
                "return_timestamps": ("word", "char", True, False),
                **dict.fromkeys(("chunk_length_s", "stride_length_s"), float),
                **dict.fromkeys(("max_new_tokens", "num_beams"), int),
                **dict.fromkeys(("language", "task"), str),
            },
        ),
        _audio(
            "zero-shot-audio-classification",
            "AutoModel",
            architectures=("ClapModel",),
            parts=("feature_extractor", "tokenizer"),
            shared=(_LABELS,),
            options=_TEMPLATE,
        ),
        PipelineTask(
            name="text-to-audio",
            autos=("AutoModelForTextToWaveform", "AutoModelForTextToSpectrogram"),
            kind="text",
            parts=("tokenizer", "processor?"),
            inputs=_TEXTS,
            options=GENERATION,
            arrays=(
                TensorSpec("audio", FP32, (-1, -1), optional=True),
                TensorSpec("lengths", INT64, (-1,), optional=True),
                TensorSpec("sampling_rate", INT64, (-1,), optional=True),
            ),
        ),
        PipelineTask(
            name="decision",
            autos=("AutoModelForDecision",),
            kind="json",
            parts=("tokenizer",),
            inputs=_TEXTS,
        ),
        _texts(
            "text-generation",
            "AutoModelForCausalLM",
            options=GENERATION,
            elsewhere=f"{_GENERATION}; for embeddings with this model set parameters.task = 'feature-extraction'",
        ),
        # The bare models of architectures, tried last.
        _texts(
            "feature-extraction",
            "AutoModelForTextEncoding",
            "AutoModel",
            options={"truncation": bool},
            arrays=_FEATURES,
        ),
        _images(
            "image-feature-extraction",
            "AutoModel",
            options={"pool": bool},
            arrays=(TensorSpec("features", FP32, None, optional=True),),
        ),
    )
}
# Other names of tasks.
TASK_ALIASES: Mapping[str, str] = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
    "text-to-speech": "text-to-audio",
    "vqa": "visual-question-answering",
    "image-text-to-text": "image-to-text",
}
# Tasks that are not in the table, and what serves their models.
_ELSEWHERE: Mapping[str, str] = {
    "conversational": f"{_GENERATION}, with chats",
    "any-to-any": f"{_GENERATION}, with images in chats; sound and video in prompts are not served",
    "image-to-image": "transformers has no models for it; wrap the model in a Python class",
}


def task_name(name: str) -> str:
    """Return the name of a task in the table for one of its other names, such as "translation_en_to_fr"."""
    return "translation" if name.startswith("translation_") else TASK_ALIASES.get(name, name)


def task_by_name(name: str) -> PipelineTask:
    """Return the task of this name. Raises ModelFailed, naming what serves it, if it is not in the table."""
    task = TASKS.get(task_name(name))
    if task is None or task.elsewhere:
        served = (each.name for each in TASKS.values() if not each.elsewhere)
        reason = task.elsewhere if task else _ELSEWHERE.get(name, f"expected one of {', '.join(served)}")
        raise ModelFailed(f"task '{name}' is not served by the runtime \"huggingface\": {reason}")
    return task


def options_of(task: PipelineTask, parameters: Parameters) -> dict[str, Any]:
    """Return the call parameters that are options of the task. Raises InvalidInput for an invalid value."""
    options: dict[str, Any] = {name: parameters[name] for name in task.options if name in parameters}
    for name, value in options.items():
        kind = task.options[name]
        if kind is float and type(value) is int:
            options[name] = value = float(value)
        is_valid = value in kind if isinstance(kind, tuple) else type(value) is kind
        if not is_valid or (kind is int and value < 1):
            expected = f"one of {', '.join(map(str, kind))}" if isinstance(kind, tuple) else _KIND_NAMES[kind]
            raise InvalidInput(f"parameter '{name}': expected {expected}, got {value!r}")
    return options


_KIND_NAMES: Mapping[type, str] = {int: "an integer from 1", bool: "true or false", float: "a number", str: "text"}
