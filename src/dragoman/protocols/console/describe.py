"""What models say of themselves, for the console and other clients: kind, description, class names and examples."""

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from dragoman.core.calls import Describe, DescribeModels, IndexEntry, ModelDescription, Request, States, Tensors
from dragoman.core.datatypes import BYTES, DATATYPES
from dragoman.core.examples import json_elements, model_example
from dragoman.core.kinds import UNKNOWN, kind_of
from dragoman.core.pictures import PictureSettings, picture_settings, takes_pictures
from dragoman.core.signature import TensorSpec
from dragoman.core.tensor import Tensor, numpy_numbers
from dragoman.protocols.console.layers import has_layers
from dragoman.protocols.wire import (
    EngineCall,
    HttpRequest,
    HttpResponse,
    PreliminaryCall,
    Route,
    bearer_token,
    message_response,
)

# Examples are sent up to this size together; tensors beyond it have no data.
_MAX_EXAMPLES_BYTES = 1_000_000
_BYTES_PER_NUMBER = 12  # of JSON, on average at most


class VersionState(msgspec.Struct):
    """A version of a model, "" if it has none. `reason` says why it is not READY."""

    version: str
    state: str
    reason: str


class ModelSummary(msgspec.Struct):
    """A model in the list. `state` is READY if one of its versions is; a model that is not loaded has the kind `model`
    and no description."""

    name: str
    state: str
    kind: str
    description: str
    platform: str
    versions: list[VersionState]


class ModelSummaries(msgspec.Struct):
    models: list[ModelSummary]


class ExampleTensor(msgspec.Struct, omit_defaults=True):
    """A tensor of an Open Inference request. BYTES that are not text are in `base64`. A long tensor has neither: its
    elements are all `fill`, or they are left out."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    base64: list[str] | None = None
    fill: Any = None

    @property
    def is_complete(self) -> bool:
        return (self.data, self.base64, self.fill) != (None, None, None)


class Example(msgspec.Struct):
    """The inputs of a request. `is_complete` is false if the elements of a tensor are left out."""

    name: str
    is_complete: bool
    inputs: list[ExampleTensor]


class ModelAbout(msgspec.Struct):
    """A model. `labels` has the class names by output and index; with `has_layers` there is a page of its graph.

    `outputs` names the outputs to request, so that those with class names are among them; it is empty if a request
    without names has them. `pictures` says how photos are sent, by input that takes them.
    """

    name: str
    versions: tuple[str, ...]
    kind: str
    description: str
    platform: str
    labels: dict[str, tuple[str, ...]]
    outputs: list[str]
    pictures: dict[str, PictureSettings]
    has_layers: bool
    examples: list[Example]


def routes() -> list[Route]:
    """Return the routes of the list and of one model."""
    patterns = ("/console/models/{model}", "/console/models/{model}/versions/{version}")
    return [
        Route("GET", "/console/models", _list, role="read"),
        *(Route("GET", pattern, _about, role="read") for pattern in patterns),
    ]


def _list(http: HttpRequest) -> PreliminaryCall[tuple[IndexEntry, ...]]:
    def describe(states: tuple[IndexEntry, ...]) -> EngineCall[tuple[ModelDescription, ...], HttpResponse]:
        # Of a thousand models it takes some milliseconds.
        return EngineCall(
            Request(DescribeModels()),
            lambda r: message_response(ModelSummaries([*_summaries(states, r.answer)])),
            in_thread=True,
        )

    return PreliminaryCall(Request(States(bearer_token(http.headers))), lambda r: describe(r.answer))


def _summaries(states: tuple[IndexEntry, ...], descriptions: tuple[ModelDescription, ...]) -> Iterator[ModelSummary]:
    described = {model.name: model for model in descriptions}
    versions: dict[str, list[VersionState]] = {}
    for entry in states:
        versions.setdefault(entry.name, []).append(VersionState(entry.version, entry.state, entry.reason))
    for name, entries in versions.items():
        known = {entry.state for entry in entries}
        state = "READY" if "READY" in known else entries[-1].state
        model = described.get(name)
        about = (UNKNOWN, "", "") if model is None else (kind_of(model), model.description, model.platform)
        yield ModelSummary(name, state, *about, entries)


def _about(http: HttpRequest) -> EngineCall[ModelDescription, HttpResponse]:
    request = Request(Describe(), http.params["model"], http.params.get("version", ""))
    return EngineCall(request, lambda r: message_response(about(r.answer)), in_thread=True)


def about(model: ModelDescription) -> ModelAbout:
    """Return what a model says of itself."""
    examples = [*_examples(model)]
    return ModelAbout(
        model.name,
        model.versions,
        kind_of(model),
        model.description,
        model.platform,
        {name: labels.names for name, labels in model.labels.items()},
        _outputs(model),
        dict(_pictures(model, examples[0].inputs if examples else [])),
        has_layers(model),
        examples,
    )


def _pictures(model: ModelDescription, example: list[ExampleTensor]) -> Iterator[tuple[str, PictureSettings]]:
    """Yield how photos are sent as each input that takes them, declared or only in the example."""
    shapes = {tensor.name: tuple(tensor.shape) for tensor in example}
    declared = [spec.name for spec in model.signature.inputs]
    others = [
        TensorSpec(t.name, DATATYPES[t.datatype], (-1,) * len(t.shape)) for t in example if t.name not in declared
    ]
    for spec in (*model.signature.inputs, *others):
        if takes_pictures(spec):
            settings = picture_settings(spec, shapes.get(spec.name, ()), model.signature.outputs)
            if settings is not None:
                yield spec.name, settings


def _outputs(model: ModelDescription) -> list[str]:
    outputs = model.signature.outputs
    further = {spec.name for spec in outputs if spec.optional and spec.shape is not None and spec.name in model.labels}
    return [spec.name for spec in outputs if not spec.optional or spec.name in further] if further else []


def _examples(model: ModelDescription) -> Iterator[Example]:
    """Yield the examples that a model ships, else the one that it has answered, else one of its declared sizes."""
    shipped: Mapping[str, Tensors] = model.examples
    if not shipped:
        found = model_example(model)
        shipped = {} if found is None else {"example": found}
    left = _MAX_EXAMPLES_BYTES
    for name, inputs in shipped.items():
        tensors = []
        for each, tensor in inputs.items():
            size = _json_size(tensor)
            tensors.append(_tensor(each, tensor, is_sent=size <= left))
            left -= min(size, left) if tensors[-1].fill is None else 0
        yield Example(name, all(each.is_complete for each in tensors), tensors)


def _json_size(tensor: Tensor) -> int:
    if tensor.datatype is BYTES:
        return sum(len(element) * 4 // 3 + 8 for element in tensor.data.flat)
    return math.prod(tensor.shape) * _BYTES_PER_NUMBER


def _tensor(name: str, tensor: Tensor, *, is_sent: bool) -> ExampleTensor:
    spec = ExampleTensor(name, [*tensor.shape], tensor.datatype.name)
    if is_sent:
        try:
            spec.data = json_elements(tensor)
        except UnicodeDecodeError:  # such as the content of a picture
            spec.base64 = [b64encode(bytes(element)).decode() for element in tensor.data.flat]
        except ValueError:  # an infinity
            pass
    elif tensor.datatype is not BYTES:
        numbers = numpy_numbers(tensor).reshape(-1)
        if numbers.size and bool(np.isfinite(numbers[0])) and bool((numbers == numbers[0]).all()):
            spec.fill = numbers[0].item()
    return spec
