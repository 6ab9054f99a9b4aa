"""What a model takes and gives: names, datatypes and shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dragoman.core.datatypes import Datatype

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    `shape` has -1 for a free axis; None means that any rank fits. `datatype` None means that any fits.
    `accepts` names further datatypes that the model takes as they are (a table of numbers, say). An optional
    input may be missing from a call; an optional output is computed only when a call asks for it. `content_type`
    is how an input is decoded that does not say so itself; "" leaves it to the model.
    """

    name: str
    datatype: Datatype | None = None
    shape: Shape | None = None
    accepts: frozenset[Datatype] = frozenset()
    optional: bool = False
    content_type: str = ""

    # The axes that are not free, with their lengths.
    fixed: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fixed = tuple((axis, n) for axis, n in enumerate(self.shape or ()) if n != -1)
        object.__setattr__(self, "fixed", fixed)

    def fits(self, shape: Shape) -> bool:
        """Whether an array of this shape does for the tensor."""
        wanted = self.shape
        if wanted is None or shape == wanted:
            return True
        if len(shape) != len(wanted):
            return False
        for axis, n in self.fixed:  # noqa: SIM110 - a generator takes twice the time
            if shape[axis] != n:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model, in order.

    `open_inputs`: any further named input fits too (the model does not tell its inputs). `open_outputs`
    likewise. `batched`: the first axis of every input and output counts rows that the model treats
    independently, so calls may be merged.

    `decodes`: the model understands content types. A call that names one in its parameters, or any call where
    `content_type` gives the model's own default, brings the inputs that its codec puts together, whatever their
    names; the codec and the model then check what is in them.

    `unchecked`: inputs and outputs are only what metadata tells; the model takes and gives what it likes.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    open_inputs: bool = False
    open_outputs: bool = False
    batched: bool = False
    decodes: bool = False
    content_type: str = ""
    unchecked: bool = False

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
