"""Inputs and outputs of a model: names, datatypes and shapes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dragoman.core.datatypes import DATATYPES, Datatype
from dragoman.core.errors import InvalidInput

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    `shape` has -1 for a free axis; None means any rank. `datatype` None means any. `accepts` lists further
    datatypes that the model takes unconverted. An optional input may be missing from a call; an optional output
    is computed only on request, and with `open_outputs` may be missing even then. `content_type` is the default codec
    of the input; "" leaves it to the model. `columns` names the columns of a matrix, () if they have no names.

    Raises TypeError if the datatype is not a `Datatype`, such as `dragoman.FP32`.
    """

    name: str
    datatype: Datatype | None = None
    shape: Shape | None = None
    accepts: frozenset[Datatype] = frozenset()
    optional: bool = False
    content_type: str = ""
    columns: tuple[str, ...] = ()

    # The axes that are not free, with their lengths.
    fixed: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given: Any = self.datatype
        if given is not None and not isinstance(given, Datatype):
            example = given if given in DATATYPES else "FP32"
            raise TypeError(f"'{self.name}': expected a datatype such as dragoman.{example}, got {given!r}")
        fixed = tuple((axis, n) for axis, n in enumerate(self.shape or ()) if n != -1)
        object.__setattr__(self, "fixed", fixed)

    def fits(self, shape: Shape) -> bool:
        """Return True if an array may have this shape."""
        expected = self.shape
        if expected is None or shape == expected:
            return True
        if len(shape) != len(expected):
            return False
        for axis, n in self.fixed:  # noqa: SIM110 - a generator takes twice the time
            if shape[axis] != n:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model, in order.

    `open_inputs`: other inputs are accepted, because the model does not declare all. `open_outputs`: the same for
    outputs. `batched`: the first axis of every input and output counts independent rows, so calls may be merged.

    `decodes`: the model decodes content types. A call with a content type in its parameters, or any call if
    `content_type` sets a default, may have inputs of any name, which the codec combines; codec and model then
    check the values.

    `unchecked`: inputs and outputs are metadata only; the model accepts and returns anything.

    `outputs_are_hints`: the outputs are those that a file declares, which its exporter may have got wrong. The model
    serves what it returns, and the metadata follow. Outputs that an author declares, in code or settings, are binding.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    open_inputs: bool = False
    open_outputs: bool = False
    batched: bool = False
    decodes: bool = False
    content_type: str = ""
    unchecked: bool = False
    outputs_are_hints: bool = False

    # Used by every call, so computed once.
    input_name_set: frozenset[str] = field(init=False, repr=False, compare=False)
    output_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    default_outputs: frozenset[str] = field(init=False, repr=False, compare=False)
    sole: TensorSpec | None = field(init=False, repr=False, compare=False)
    _inputs: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    _outputs: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_name_set", frozenset(s.name for s in self.inputs))
        object.__setattr__(self, "output_names", tuple(s.name for s in self.outputs))
        object.__setattr__(self, "default_outputs", frozenset(s.name for s in self.outputs if not s.optional))
        checked = len(self.outputs) == 1 and not (self.unchecked or self.outputs[0].optional)
        object.__setattr__(self, "sole", self.outputs[0] if checked else None)
        object.__setattr__(self, "_inputs", {s.name: s for s in self.inputs})
        object.__setattr__(self, "_outputs", {s.name: s for s in self.outputs})

    def input(self, name: str) -> TensorSpec | None:
        return self._inputs.get(name)

    def output(self, name: str) -> TensorSpec | None:
        return self._outputs.get(name)


OPEN = Signature(open_inputs=True, open_outputs=True)


def check_columns(given: Collection[str], names: Collection[str], table: str) -> None:
    """Raise InvalidInput unless a table, which is called so in the message, has the columns with these names."""
    missing = [name for name in names if name not in given]
    extra = [name for name in given if name not in names]
    if missing or extra:
        reasons = [f"the {table} has no {', '.join(map(repr, missing))}"] if missing else []
        reasons += [f"the model has no {', '.join(map(repr, extra))}"] if extra else []
        raise InvalidInput(f"expected the columns {', '.join(map(repr, names))}: {'; '.join(reasons)}")
