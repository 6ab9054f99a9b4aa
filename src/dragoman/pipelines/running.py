"""Run a pipeline on rows: one function for all tasks, whatever form their pipelines take."""

from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.pipelines.loading import make_pipeline
from dragoman.pipelines.question_answering import AnswerExtractor
from dragoman.pipelines.tasks import PipelineTask

Run = Callable[[list[Any], Mapping[str, Any]], list[Any]]


def run_function(
    transformers: Any,
    task: PipelineTask,
    name: str,
    model: Any,
    parts: Mapping[str, Any],
    device: str,
    batch_size: int,
) -> Run:
    """Return the function from rows, and the options and shared inputs of a call, to one result for each row.

    batch_size: rows that are computed together, if they are texts that can be padded or images.
    """
    tokenizer: Any = parts.get("tokenizer")
    if task.name == "question-answering":
        if not tokenizer.is_fast:
            raise ModelFailed("question answering needs a fast tokenizer, a tokenizer.json in the model's folder")
        reader = AnswerExtractor(model.to(device), tokenizer)
        return lambda rows, options: [reader(question, context, options) for question, context in rows]
    pipeline = make_pipeline(transformers, task, name, model, parts, device)
    size = 1 if tokenizer is not None and tokenizer.pad_token_id is None else batch_size
    arrange = _ARRANGEMENTS.get(task.name)

    def run(rows: list[Any], options: Mapping[str, Any]) -> list[Any]:
        if arrange is not None:
            rows, options = arrange(rows, options)
        if task.kind in _ALONE:
            return [pipeline(row, **options) for row in rows]
        return list(pipeline((row for row in rows), batch_size=size, **options))

    return run


# Kinds of rows that the pipelines do not take in sequence.
_ALONE = ("table", "image pair", "json")

# --- options of a call as the pipeline takes them -------------------------------------------------------------------

_Arranged = tuple[list[Any], Mapping[str, Any]]


def _fill_mask(rows: list[Any], options: Mapping[str, Any]) -> _Arranged:
    truncation = {"tokenizer_kwargs": {"truncation": True}} if options.get("truncation") else {}
    return rows, {**{k: v for k, v in options.items() if k != "truncation"}, **truncation}


def _features(rows: list[Any], options: Mapping[str, Any]) -> _Arranged:
    return rows, {**options, "return_tensors": True}


def _with_labels(rows: list[Any], options: Mapping[str, Any]) -> _Arranged:
    labels = options["candidate_labels"]
    rest = {name: value for name, value in options.items() if name != "candidate_labels"}
    return [{"image": row, "candidate_labels": labels} for row in rows], rest


def _hypotheses(rows: list[Any], options: Mapping[str, Any]) -> _Arranged:
    template = options.get("hypothesis_template", "{}")
    # Other fields of a format string read attributes, or ask for any width.
    if "{}" not in template or set("{}") & set(template.replace("{}", "")):
        raise InvalidInput(f"parameter 'hypothesis_template': expected text with {{}} for a label, got {template!r}")
    return rows, options


def _speech(rows: list[Any], options: Mapping[str, Any]) -> _Arranged:
    names = ("max_new_tokens", "num_beams", "language", "task")
    given = {name: options[name] for name in names if name in options}
    rest = {name: value for name, value in options.items() if name not in names}
    return rows, {**rest, **({"generate_kwargs": given} if given else {})}


def _sound(rows: list[Any], options: Mapping[str, Any]) -> _Arranged:
    return rows, {"generate_kwargs": dict(options)} if options else {}


def _table(rows: list[Any], options: Mapping[str, Any]) -> _Arranged:
    truncation = {"truncation": "drop_rows_to_fit" if options["truncation"] else "do_not_truncate"}
    return rows, {**options, **(truncation if "truncation" in options else {})}


_ARRANGEMENTS: Mapping[str, Callable[[list[Any], Mapping[str, Any]], _Arranged]] = {
    "fill-mask": _fill_mask,
    "feature-extraction": _features,
    "image-feature-extraction": _features,
    "zero-shot-classification": _hypotheses,
    "zero-shot-image-classification": _hypotheses,
    "zero-shot-audio-classification": _hypotheses,
    "zero-shot-object-detection": _with_labels,
    "automatic-speech-recognition": _speech,
    "text-to-audio": _sound,
}
