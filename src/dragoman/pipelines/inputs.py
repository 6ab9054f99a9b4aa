"""Rows of a pipeline from the tensors of a request: texts, images, sounds, tables, and combinations of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.codecs.elements import strings
from dragoman.core.binding import check_tensor
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Parameters, Tensor
from dragoman.formats.base64_text import decode_base64
from dragoman.pipelines.audio import is_audio, read_audio, resample
from dragoman.pipelines.tasks import ALIASES, PipelineTask

Tensors = Mapping[str, Tensor]


def input_specs(tasks: list[PipelineTask]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model with these tasks; those that not all of them need are optional."""
    specs: dict[str, TensorSpec] = {}
    for task in tasks:
        specs |= {spec.name: spec for spec in (*task.inputs, *task.also, *task.shared) if spec.name not in specs}
    needed = [{s.name for s in (*t.inputs, *t.also, *t.shared) if not s.optional} for t in tasks]
    always = set.intersection(*needed)
    return tuple(
        spec if spec.name in always else TensorSpec(spec.name, spec.datatype, spec.shape, optional=True)
        for spec in specs.values()
    )


def choose_task(tasks: list[PipelineTask], inputs: Tensors) -> PipelineTask:
    """Return the first task whose inputs for all rows are there."""
    fitting = (task for task in tasks if all(spec.optional or spec.name in inputs for spec in task.shared))
    return next(fitting, tasks[0])


def rows_of(task: PipelineTask, inputs: Tensors, parameters: Parameters, rate: int) -> list[Any]:
    """Return the rows of a request as the pipeline takes them. `rate`: that of the model's sounds in Hz.

    Raises InvalidInput naming the input.
    """
    further = {spec.name: spec for spec in (*task.also, *task.shared)}
    first = {name: tensor for name, tensor in inputs.items() if name not in further}
    if len(first) != 1:
        raise InvalidInput(f"expected one input, {_names(task)}; got {', '.join(first) or 'none'}")
    ((name, tensor),) = first.items()
    known = {spec.name: spec for spec in task.inputs}
    spec = known.get(name) or (task.inputs[0] if name in ALIASES else None)
    if spec is None:
        raise InvalidInput(f"unexpected inference input '{name}'; expected {_names(task)}")
    check_tensor(tensor, TensorSpec(name, spec.datatype, spec.shape), "input")
    for spec in further.values():
        if spec.name in inputs:
            check_tensor(inputs[spec.name], spec, "input")
        elif not spec.optional:
            raise InvalidInput(f"input '{spec.name}': expected {list(spec.shape or ())} of {spec.datatype}, got none")
    rows = _FIRST[task.kind](tensor, name, parameters, rate)
    columns = {each.name: _column(each.name, inputs, len(rows)) for each in task.also if each.name in inputs}
    return _COMBINED[task.kind](rows, columns) if task.kind in _COMBINED else _with_pairs(rows, columns)


def shared_of(task: PipelineTask, inputs: Tensors) -> dict[str, list[str]]:
    """Return the inputs for all rows by name. Raises InvalidInput for one without elements."""
    shared = {}
    for spec in task.shared:
        if spec.name in inputs:
            texts: list[str] = strings(inputs[spec.name], spec.name).tolist()
            if not texts or not all(texts):
                raise InvalidInput(f"input '{spec.name}': expected non-empty texts, got {texts or 'none'}")
            shared[spec.name] = texts
    return shared


def _names(task: PipelineTask) -> str:
    return " or ".join(f"'{spec.name}'" for spec in task.inputs)


# --- the first input -----------------------------------------------------------------------------------------------


def _texts(tensor: Tensor, name: str, _parameters: Parameters, _rate: int) -> list[Any]:
    texts: list[Any] = strings(tensor, name).tolist()
    return texts


def _images(tensor: Tensor, name: str, _parameters: Parameters, _rate: int) -> list[Any]:
    """Images from files, also in base64 or as `data:` URLs, or from pixels. Paths and addresses are never opened."""
    from PIL import Image

    from dragoman.codecs.image import image_decoder

    if tensor.datatype is BYTES:
        decode = image_decoder()
        return [decode(element, f"input '{name}'") for element in tensor.data.flat]

    return [Image.fromarray(pixels) for pixels in tensor.data.reshape(-1, *tensor.shape[-3:])]


def _image_pairs(tensor: Tensor, name: str, parameters: Parameters, rate: int) -> list[Any]:
    images = _images(tensor, name, parameters, rate)
    return [images[i : i + 2] for i in range(0, len(images), 2)]


def _sounds(tensor: Tensor, name: str, parameters: Parameters, rate: int) -> list[Any]:
    """Sounds from files, or from samples at the rate of the parameter `sampling_rate`, by default the model's."""
    where = f"input '{name}'"
    if tensor.datatype is BYTES:
        return [decode_audio(element, rate, where) for element in tensor.data.flat]
    given = parameters.get("sampling_rate", rate)
    if type(given) is not int:
        raise InvalidInput(f"parameter 'sampling_rate': expected an integer in Hz, got {given!r}")
    if not tensor.data.shape[1] or not np.isfinite(tensor.data).all():
        raise InvalidInput(f"{where}: expected finite samples")
    return [resample(np.array(samples), given, rate, where) for samples in tensor.data]


def decode_audio(element: bytes, rate: int, where: str) -> Array:
    """Return the samples of an audio file, as it is or in base64."""
    content = element
    if not is_audio(element):
        try:
            content = decode_base64(element)
        except ValueError:
            content = element
    return read_audio(content, rate, where)


def _frames(tensor: Tensor, _name: str, _parameters: Parameters, _rate: int) -> list[Any]:
    return list(tensor.data)


def _json(tensor: Tensor, name: str, _parameters: Parameters, _rate: int) -> list[Any]:
    return [_parse(text, name, i) for i, text in enumerate(strings(tensor, name).tolist())]


def _parse(text: str, name: str, index: int) -> Any:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InvalidInput(f"input '{name}': expected JSON at element {index}: {error}") from error
    return value


_FIRST: Mapping[str, Callable[[Tensor, str, Parameters, int], list[Any]]] = {
    "text": _texts,
    "question": _texts,
    "table": _texts,
    "image": _images,
    "document": _images,
    "image pair": _image_pairs,
    "audio": _sounds,
    "video": _frames,
    "json": _json,
}

# --- further inputs of a row ---------------------------------------------------------------------------------------


def _column(name: str, inputs: Tensors, rows: int) -> list[str]:
    """Return the element of each row; a single one is that of all rows."""
    values: list[str] = strings(inputs[name], name).tolist()
    if len(values) not in (1, rows):
        raise InvalidInput(
            f"input '{name}': expected the same number of rows as the first input, {rows}, got {len(values)}"
        )
    return values if len(values) == rows else values * rows


def _with_pairs(rows: list[Any], columns: Mapping[str, list[str]]) -> list[Any]:
    if "text_pair" not in columns:
        return rows
    return [{"text": a, "text_pair": b} for a, b in zip(rows, columns["text_pair"], strict=True)]


def _questions(rows: list[Any], columns: Mapping[str, list[str]]) -> list[Any]:
    return list(zip(rows, columns["context"], strict=True))


def _tables(rows: list[Any], columns: Mapping[str, list[str]]) -> list[Any]:
    tables = [_table(text, i) for i, text in enumerate(columns["table"])]
    for i, query in enumerate(rows):
        if not query:
            raise InvalidInput(f"input 'query': expected a question at element {i}, got ''")
    return [{"query": query, "table": table} for query, table in zip(rows, tables, strict=True)]


def _table(text: str, index: int) -> dict[str, list[str]]:
    """Return the columns of a table by name; its cells are texts."""
    value = _parse(text, "table", index)
    columns = value if isinstance(value, dict) else {}
    cells = {name: [str(cell) for cell in cells] for name, cells in columns.items() if isinstance(cells, list)}
    if (
        not columns
        or len(cells) < len(columns)
        or not min(map(len, cells.values())) == max(map(len, cells.values())) > 0
    ):
        raise InvalidInput(
            f"input 'table': expected an object of columns at element {index}, lists of as many cells each; got "
            f"{text[:80]!r}"
        )
    return cells


def _documents(rows: list[Any], columns: Mapping[str, list[str]]) -> list[Any]:
    documents: list[dict[str, Any]] = [{"image": image} for image in rows]
    for name, values in columns.items():
        for i, (document, value) in enumerate(zip(documents, values, strict=True)):
            document[name] = _word_boxes(value, i) if name == "word_boxes" else value
    return documents


def _word_boxes(text: str, index: int) -> Any:
    """Return pairs of a word and its box, from 0 to 1000."""
    value = _parse(text, "word_boxes", index)
    pairs: list[Any] = value if isinstance(value, list) else [None]
    for pair in pairs:
        match pair:
            case [str(), [int(), int(), int(), int()] as box] if all(0 <= edge <= 1000 for edge in box):
                continue
        raise InvalidInput(
            f"input 'word_boxes': expected pairs [word, [left, top, right, bottom]] from 0 to 1000 at element {index}; "
            f"got {str(pair)[:80]}"
        )
    return [(word, box) for word, box in pairs]


_COMBINED: Mapping[str, Callable[[list[Any], Mapping[str, list[str]]], list[Any]]] = {
    "question": _questions,
    "table": _tables,
    "document": _documents,
}
