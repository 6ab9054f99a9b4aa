"""What a model is for, in one word, from its description, and the outputs that names of classes belong to."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from dragoman.core.calls import Embed, Generate, Infer, ModelDescription, SignatureFor
from dragoman.core.datatypes import BYTES
from dragoman.core.examples import RATE_NAMES
from dragoman.core.scoring import Score
from dragoman.core.signature import Shape, TensorSpec

UNKNOWN = "model"
KINDS = frozenset(
    {
        "audio", "chat", "classifier", "clustering", "completion", "detector", "embeddings", "ensemble", "function",
        "graph", "image", "ocr", "outliers", "preprocessor", "regressor", "rerank", "segmentation", "simulator",
        "speech", "text", UNKNOWN,
    }
)  # fmt: skip

# Tasks of pipelines, as their models name them.
TASKS: Mapping[str, str] = {
    "audio-classification": "classifier",
    "automatic-speech-recognition": "speech",
    "depth-estimation": "image",
    "document-question-answering": "text",
    "feature-extraction": "embeddings",
    "fill-mask": "text",
    "image-classification": "classifier",
    "image-feature-extraction": "embeddings",
    "image-segmentation": "segmentation",
    "image-to-image": "image",
    "image-to-text": "text",
    "mask-generation": "segmentation",
    "object-detection": "detector",
    "question-answering": "text",
    "sentence-similarity": "embeddings",
    "summarization": "text",
    "table-question-answering": "text",
    "text-classification": "classifier",
    "text-generation": "completion",
    "text-to-audio": "audio",
    "text-to-speech": "audio",
    "text2text-generation": "text",
    "token-classification": "classifier",
    "translation": "text",
    "video-classification": "classifier",
    "visual-question-answering": "text",
    "zero-shot-audio-classification": "classifier",
    "zero-shot-classification": "classifier",
    "zero-shot-image-classification": "classifier",
    "zero-shot-object-detection": "detector",
    # as exporters of detectors write them into the metadata of a file
    "classify": "classifier",
    "detect": "detector",
    "obb": "detector",
    "pose": "detector",
    "segment": "segmentation",
}
_COLORS = (1, 3, 4)
_MIN_BOXES = 100  # candidates of a detector without suppression of overlapping boxes; fewer may be anything
_BOX = 4  # numbers of a box
_BOX_ROW = 6  # a box, its score and its class

_BOXES = frozenset({"boxes", "bboxes", "detection_boxes", "pred_boxes"})
_SCORES = frozenset({"predict_proba", "probabilities", "output_probability", "class_probabilities", "label_probs"})
_VECTORS = frozenset({"embedding", "embeddings", "sentence_embedding", "text_embeds", "image_embeds", "pooler_output"})
_TOKENS = frozenset({"input_ids"})
_HIDDEN = frozenset({"last_hidden_state", "token_embeddings"})
_SOUNDS = frozenset({"audio", "input_values", "samples", "speech", "voice", "wav", "waveform"})
_MIN_SAMPLES = 8000  # of a sound in one channel; a table has no such axis beside its rows


def kind_of(model: ModelDescription) -> str:
    """Return what a model is for, a member of `KINDS`: as it says itself, else by its calls, tasks, labels and tensors.

    `UNKNOWN` where these do not tell.
    """
    if model.kind in KINDS:
        return model.kind
    return next((kind for rule in _RULES if (kind := rule(model))), UNKNOWN)


def _of_text(model: ModelDescription) -> str:
    if Generate not in model.calls:
        return ""
    return "completion" if model.details.get("chat_template", True) is False else "chat"


def _of_tasks(model: ModelDescription) -> str:
    tasks = model.details.get("tasks")
    tasks = [*tasks] if isinstance(tasks, list | tuple) else [model.details.get("task")]
    if Score in model.calls and [*map(len, map(_names, model.labels.values()))] == [1]:
        return "rerank"  # one label: a score of a pair
    return next((kind for task in tasks if isinstance(task, str) and (kind := TASKS.get(task, ""))), "")


def _names(labels: object) -> Sequence[str]:
    return getattr(labels, "names", ())


def _of_calls(model: ModelDescription) -> str:
    if "graph" in model.details:
        return "graph"
    if SignatureFor in model.calls:
        return "simulator"
    if Embed in model.calls:
        return "embeddings"
    return "rerank" if Score in model.calls else ""


def _of_tensors(model: ModelDescription) -> str:
    """Return the kind by names and shapes of inputs and outputs, if they leave no doubt."""
    inputs, outputs = model.signature.inputs, model.signature.outputs
    names = {spec.name.lower() for spec in outputs}
    given = {spec.name.lower() for spec in inputs}
    is_picture = any(_is_picture(spec) for spec in inputs)
    if names & _BOXES or (is_picture and any(_is_candidates(spec, model) for spec in outputs)):
        return "segmentation" if any("mask" in name or "proto" in name for name in names) else "detector"
    if names & _VECTORS or (given & _TOKENS and names & _HIDDEN):
        return "embeddings"
    if is_picture and any(_is_map(spec, inputs) for spec in outputs):
        return "image" if any(_colors(spec.shape) == 3 for spec in outputs) else "segmentation"
    if any(_is_line_of_text(spec) for spec in inputs) and [len(spec.shape or ()) for spec in outputs] == [3]:
        return "ocr"
    has_rate = len(inputs) > 1 and any(map(_is_rate, inputs))
    if has_rate or any(map(_is_sound, inputs)) or any(map(_words_of_sound, names)):
        return "audio"
    return "text" if given & _TOKENS and "logits" in names and not _has_scores(model) else ""


def _is_rate(spec: TensorSpec) -> bool:
    """Return whether an input is one sample rate; a column of rates, one for each row, is none."""
    return spec.name.lower() in RATE_NAMES and (spec.shape is None or all(length == 1 for length in spec.shape))


def _of_scores(model: ModelDescription) -> str:
    return "classifier" if _has_scores(model) else ""


def _has_scores(model: ModelDescription) -> bool:
    """Return whether an output is a probability for each class: by its name, its labels, or the answer to the trial."""
    return any(
        spec.name.lower() in _SCORES
        or spec.name in model.labels
        or (spec.name in model.distributions and len(spec.shape or ()) <= 2)
        for spec in model.signature.outputs
    )


def _is_picture(spec: TensorSpec) -> bool:
    return spec.datatype is not BYTES and _colors(spec.shape) > 0


def _colors(shape: Shape | None) -> int:
    """Return the number of colours of a batch of pictures, channels first or last; 0 if it is none."""
    if shape is None or len(shape) != 4:
        return 0
    layouts = ((shape[1], shape[2:]), (shape[3], shape[1:3]))
    return next((n for n, sides in layouts if n in _COLORS and all(s == -1 or s > _BOX for s in sides)), 0)


def _is_line_of_text(spec: TensorSpec) -> bool:
    """Return whether a picture has a fixed height and any width."""
    return _is_picture(spec) and spec.shape is not None and spec.shape[2] > 0 and spec.shape[3] == -1


def _is_sound(spec: TensorSpec) -> bool:
    shape = spec.shape or ()
    is_channel = len(shape) == 3 and 1 in shape[1:] and max(shape[1:]) >= _MIN_SAMPLES
    return is_channel or _words_of_sound(spec.name.lower())


def _words_of_sound(name: str) -> bool:
    return name in _SOUNDS or not _SOUNDS.isdisjoint(name.split("_"))


def _is_candidates(spec: TensorSpec, model: ModelDescription) -> bool:
    """Return whether an output is a box with the scores of classes for each of many places: [rows, 4 + n, places]."""
    shape = spec.shape
    if shape is None or len(shape) != 3:
        return False
    labels = model.labels.get(spec.name)
    if labels is not None:
        return has_boxes(shape, len(labels.names))
    fields, places = sorted(shape[1:])
    return fields > _BOX and places >= max(_MIN_BOXES, 4 * fields)


def named_outputs(
    names: Sequence[str], outputs: Iterable[TensorSpec], *, is_detector: bool = False
) -> dict[str, Sequence[str]]:
    """Return the names by the output that they belong to; empty without names, or if that is not clear.

    It is the only output whose last axis has a value for each class; of a detector the first one that has, for each
    place, a box and the scores of the classes.
    """
    specs = [*outputs]
    fitting = [spec for spec in specs if spec.shape and spec.shape[-1] == len(names)]
    if names and is_detector:
        with_boxes = (spec for spec in specs if len(spec.shape or ()) >= 3 and has_boxes(spec.shape or (), len(names)))
        fitting = [*with_boxes][:1] or fitting or specs[:1]
    return {fitting[0].name: names} if names and len(fitting) == 1 else {}


def has_boxes(shape: Shape, classes: int) -> bool:
    """Return whether an axis after the first is that of a box with the scores of so many classes, also with one of the
    object; or that of a box with its score and its class."""
    return any(length in (_BOX + classes, _BOX + 1 + classes, _BOX_ROW) for length in shape[1:])


def _is_map(spec: TensorSpec, inputs: Iterable[TensorSpec]) -> bool:
    """Return whether an output has a value for each pixel of an input."""
    if spec.shape is None or len(spec.shape) != 4:
        return False
    sizes = {size for each in inputs if _is_picture(each) for size in _sides(each.shape)}
    return bool(sizes.intersection(_sides(spec.shape)))


def _sides(shape: Shape | None) -> Iterable[Shape]:
    return () if shape is None else (shape[2:], shape[1:3])


def _of_platform(model: ModelDescription) -> str:
    return "function" if model.platform == "python_function" and Infer in model.calls else ""


_RULES: Sequence[Callable[[ModelDescription], str]] = (
    _of_text,
    _of_tasks,
    _of_calls,
    _of_tensors,
    _of_scores,
    _of_platform,
)
