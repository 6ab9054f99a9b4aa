"""The tasks of Hugging Face models: inputs, outputs and options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dragoman.core.datatypes import BYTES, DATATYPES, FP32, INT64
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Parameters

# What an option of a call has to be: of a type, or one of some words.
Kind = type | tuple[str, ...]

_FUNCTIONS: Kind = ("sigmoid", "softmax", "none")
_AGGREGATIONS: Kind = ("none", "simple", "first", "average", "max")


@dataclass(frozen=True, slots=True)
class PipelineTask:
    """A task. `auto` is the class of transformers that loads the model, `suffix` the end of its architecture's name.

    `reads`: the kind of its inputs. `options`: the call parameters that it accepts. `rows`: the result of a row does
    not depend on the other rows.
    """

    name: str
    auto: str
    suffix: str
    reads: Literal["texts", "questions", "images"]
    inputs: tuple[TensorSpec, ...]
    options: Mapping[str, Kind]
    extra_outputs: tuple[TensorSpec, ...] = ()
    rows: bool = True


_TEXTS = (TensorSpec("args", BYTES, (-1,), optional=True),)
_QUESTIONS = (TensorSpec("question", BYTES, (-1,)), TensorSpec("context", BYTES, (-1,)))
_IMAGES = (
    TensorSpec("inputs", BYTES, (-1,), optional=True),
    TensorSpec("pixels", DATATYPES["UINT8"], (-1, -1, -1, 3), optional=True),
)
_FEATURES = (
    TensorSpec("features", FP32, (-1, -1, -1), optional=True),
    TensorSpec("attention_mask", INT64, (-1, -1), optional=True),
)

TASKS: Mapping[str, PipelineTask] = {
    task.name: task
    for task in (
        PipelineTask(
            "text-classification",
            "AutoModelForSequenceClassification",
            "ForSequenceClassification",
            "texts",
            _TEXTS,
            {"top_k": int, "function_to_apply": _FUNCTIONS, "truncation": bool},
        ),
        PipelineTask(
            "token-classification",
            "AutoModelForTokenClassification",
            "ForTokenClassification",
            "texts",
            _TEXTS,
            {"aggregation_strategy": _AGGREGATIONS},
        ),
        PipelineTask(
            "question-answering",
            "AutoModelForQuestionAnswering",
            "ForQuestionAnswering",
            "questions",
            _QUESTIONS,
            {"top_k": int, "max_answer_len": int, "handle_impossible_answer": bool, "align_to_words": bool},
        ),
        PipelineTask(
            "image-classification",
            "AutoModelForImageClassification",
            "ForImageClassification",
            "images",
            _IMAGES,
            {"top_k": int, "function_to_apply": _FUNCTIONS},
        ),
        # The bare model of an architecture, BertModel say; tried last, as every other name has a longer end.
        PipelineTask(
            "feature-extraction", "AutoModel", "Model", "texts", _TEXTS, {"truncation": bool}, _FEATURES, rows=False
        ),
    )
}
# Other names of tasks.
_TASK_ALIASES = {"sentiment-analysis": "text-classification", "ner": "token-classification"}
_GENERATION = ("text-generation", "text2text-generation", "summarization", "translation", "conversational")
_GENERATION_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

# Names of the single input of a task that clients use in addition to the one in the metadata.
ALIASES = ("args", "array_inputs", "inputs", "text_inputs")


def task_by_name(name: str) -> PipelineTask:
    """Return the task of this name. Raises ModelFailed if it is not supported."""
    task = TASKS.get(_TASK_ALIASES.get(name, name))
    if task is None:
        raise ModelFailed(
            "text generation is not what this runtime does; serve the model with a runtime that generates text, or for "
            "embeddings with parameters.task = 'feature-extraction'"
            if name.startswith(_GENERATION)
            else f"task '{name}' is not served; expected one of {', '.join(TASKS)}"
        )
    return task


def task_by_architecture(architectures: list[str] | None) -> PipelineTask:
    """Return the task of an architecture, by the end of its name. Raises ModelFailed if there is none."""
    name = (architectures or [""])[0]
    if name.endswith(_GENERATION_SUFFIXES):
        return task_by_name("text-generation")
    found = next((task for task in TASKS.values() if name.endswith(task.suffix)), None)
    if found is None:
        raise ModelFailed(
            f"the model's config.json names the architecture '{name}', which belongs to no task: expected one of "
            f"{', '.join(TASKS)} as parameters.task"
        )
    return found


def options_of(task: PipelineTask, parameters: Parameters) -> dict[str, Any]:
    """Return the call parameters that are options of the task. Raises InvalidInput for an invalid value."""
    options = {name: parameters[name] for name in task.options if name in parameters}
    for name, value in options.items():
        kind = task.options[name]
        is_valid = value in kind if isinstance(kind, tuple) else type(value) is kind
        if not is_valid or (kind is int and isinstance(value, int) and value < 1):
            expected = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else _KIND_NAMES[kind]
            raise InvalidInput(f"parameter '{name}': expected {expected}, got {value!r}")
    return options


_KIND_NAMES: Mapping[type, str] = {int: "an integer from 1", bool: "true or false"}
