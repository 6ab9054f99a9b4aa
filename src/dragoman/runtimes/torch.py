"""PyTorch programs: TorchScript archives and programs of torch.export."""

import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dragoman import plugins
from dragoman.codecs.elements import strings
from dragoman.core.calls import ApplyHessian, ApplyJacobian, DerivativeCall, Gradient, Infer
from dragoman.core.datatypes import BYTES, DATATYPES, FP32, FP64, INT64, NUMERIC, Array, Datatype, widens
from dragoman.core.errors import InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.model import Model, Result
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.core.vector_binding import VectorSignature, vector_signature
from dragoman.core.vectors import VectorFunction
from dragoman.runtimes.files import check_operators, check_pickle, model_path
from dragoman.system.threads import PYTORCH_LOADS

log = logging.getLogger("dragoman.model")

# Datatypes by PyTorch's names.
_DATATYPES: Mapping[str, Datatype] = {f"torch.{d.dtype.name}": d for d in DATATYPES.values() if d is not BYTES}


_INTEGERS = frozenset(d for d in NUMERIC if d.kind in ("int", "uint") and widens(d, INT64))
# Datatypes of the Python types of TorchScript, and those that convert to them.
_SCALARS: Mapping[str, tuple[Datatype, frozenset[Datatype]]] = {
    "int": (INT64, _INTEGERS),
    "float": (FP64, frozenset(d for d in NUMERIC if widens(d, FP64))),
    "bool": (DATATYPES["BOOL"], frozenset()),
    "str": (BYTES, frozenset()),
}


class _Program(msgspec.Struct, frozen=True):
    """The interface of a program. scalars: inputs that are Python numbers or texts, not tensors.

    arguments: returns positional and keyword arguments for the inputs of a call by name.
    """

    signature: Signature
    scalars: frozenset[str]
    arguments: Callable[[Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]]


class TorchModel(Model):
    """A program of torch.jit (.pt, .pth, .ts, .jit, ...) or of torch.export (.pt2), on the CPU.

    Inputs have the names of forward's arguments; an int, float, bool or str is a tensor of shape []. An output that is
    a tensor or a tuple is `output-0`, `output-1`, ...; one that is a dict has its keys. The positions and keys of
    tuples, lists and dicts within are appended: `output-1-0`, `boxes-0`. TorchScript declares neither datatypes nor
    shapes, nor whether rows are independent: calls are merged only if the operator sets `max_batch_size`.
    """

    merges = 0
    _vectors: VectorSignature | None = None
    _function: VectorFunction | None = None

    def load(self) -> None:
        path = model_path(self.spec)
        if path.suffix == ".pt2":
            # torch.export.load falls back to plain pickle for constants and sample inputs.
            check_pickle(path, self.spec)
        self._torch = RUNTIME.require("torch")
        if path.suffix == ".pt2":
            self.platform = "pytorch_export"
            program, self._module = _load_export(self._torch, path)
            self._program = _exported_program(self._torch, program)
        else:
            self.platform = "pytorch_torchscript"
            self._module = _load_script(self._torch, path, self.spec)
            self._program = _script_program(self._module, path, self.spec)
        self._signature = self._program.signature
        self._offer_derivatives()

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Result:
        known = [spec.name for spec in self._signature.inputs]
        inputs = call.inputs
        # Inputs renamed by the operator are in the order of the program.
        if not inputs.keys() <= set(known):
            inputs = dict(zip(known, inputs.values(), strict=False))
        values = {name: self._to_torch(name, tensor) for name, tensor in inputs.items()}
        with self._torch.inference_mode():
            return self._result(self._run(values))

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        positional, named = self._program.arguments(inputs)
        return self._module(*positional, **named)

    # --- derivatives -----------------------------------------------------------------------------------------

    def _offer_derivatives(self) -> None:
        """Add derivatives if all tensors are float vectors of known lengths, by the file or by the operator."""
        signature = replace(
            self._signature,
            inputs=self.spec.inputs or self._signature.inputs,
            outputs=self.spec.outputs or self._signature.outputs,
        )
        vectors = vector_signature(signature)
        if vectors is None or len(signature.inputs) != len(self._signature.inputs):
            if any(spec.datatype is None for spec in (*signature.inputs, *signature.outputs)):
                log.info(
                    "not served over UM-Bridge, TorchScript declares no datatypes and shapes; declare `inputs` and "
                    "`outputs` in a dragoman.toml: model=%s",
                    self.spec.name,
                )
            return
        if not plugins.has("derivatives", "torch"):
            return
        self._vectors = vectors
        self._function = plugins.find("derivatives", "torch")(
            self._forward,
            [spec.shape for spec in vectors.inputs],
            [self._torch.float32 if spec.datatype is FP32 else self._torch.float64 for spec in vectors.inputs],
            [spec.size for spec in vectors.outputs],
            self.spec.name,
            self.spec.parameters.get("verify"),
        )
        for name in self._function.sources():
            if name != "evaluate":
                setattr(self, name, getattr(self, f"_{name}"))

    def details(self) -> Mapping[str, Any]:
        if self._function is None or self._vectors is None:
            return {}
        suffix = " (float32)" if any(spec.datatype is FP32 for spec in self._vectors.inputs) else ""
        sources = {name: source + suffix for name, source in self._function.sources().items() if name != "evaluate"}
        missing = self._function.missing()
        return {"derivatives": sources, **({"missing_derivatives": dict(missing)} if missing else {})}

    def _forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the outputs for the inputs, both in order."""
        names = [spec.name for spec in self._signature.inputs]
        result = self._run(dict(zip(names, tensors, strict=True)))
        if isinstance(result, dict) and self._vectors:
            return tuple(result[spec.name] for spec in self._vectors.outputs)
        return tuple(value for _, value in _leaves(result))

    def _gradient(self, call: Gradient) -> Any:
        output, (index,), inputs = self._indices_and_inputs(call, call.input)
        return self._differentiable().gradient(output, index, inputs, call.sens.data, {})

    def _apply_jacobian(self, call: ApplyJacobian) -> Any:
        output, (index,), inputs = self._indices_and_inputs(call, call.input)
        return self._differentiable().apply_jacobian(output, index, inputs, call.vec.data, {})

    def _apply_hessian(self, call: ApplyHessian) -> Any:
        output, (index1, index2), inputs = self._indices_and_inputs(call, call.input1, call.input2)
        sens, vec = call.sens.data, call.vec.data
        return self._differentiable().apply_hessian(output, index1, index2, inputs, sens, vec, {})

    def _differentiable(self) -> VectorFunction:
        assert self._function is not None
        return self._function

    def _indices_and_inputs(self, call: DerivativeCall, *inputs: str | int) -> tuple[int, list[int], list[Array]]:
        """Return the index of the output, the indices of inputs, and the input vectors."""
        assert self._vectors is not None
        names, outputs = [s.name for s in self._vectors.inputs], [s.name for s in self._vectors.outputs]
        vectors = [call.inputs[name].data for name in names]
        return outputs.index(str(call.output)), [names.index(str(name)) for name in inputs], vectors

    def _to_torch(self, name: str, tensor: Tensor) -> Any:
        if name in self._program.scalars:
            return str(strings(tensor, name)) if tensor.datatype is BYTES else tensor.data.item()
        if tensor.datatype is BYTES:
            raise InvalidInput(f"input '{name}': PyTorch has no strings; expected numbers, got BYTES")
        view = tensor.datatype.wire_view
        array = tensor.data if view is None else tensor.data.view(view)
        # PyTorch shares the memory of the array and has no read-only tensors.
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()
        shared = self._torch.from_numpy(array)
        return shared if view is None else shared.view(getattr(self._torch, tensor.datatype.dtype.name))

    def _result(self, result: Any) -> Result:
        if isinstance(result, dict) or not self._signature.outputs:
            return {name: self._to_numpy(name, value) for name, value in _leaves(result) if value is not None}
        return tuple(self._to_numpy(name, value) for name, value in _leaves(result))

    def _to_numpy(self, name: str, value: Any) -> Array:
        if isinstance(value, bool | int | float | str):
            return np.array(value, object if isinstance(value, str) else None)
        if not isinstance(value, self._torch.Tensor):
            raise InvalidOutput(f"output '{name}': expected a tensor, got {type(value).__name__}")
        value = value.detach().cpu()
        datatype = _DATATYPES.get(str(value.dtype))
        if datatype is not None and datatype.wire_view is not None:
            array: Array = value.view(getattr(self._torch, datatype.wire_view.name)).numpy().view(datatype.dtype)
        else:
            array = value.resolve_conj().resolve_neg().numpy()
        return array


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in a result by name: those in tuples, lists and dicts, or the result itself."""
    match value:
        case tuple() | list():
            for index, each in enumerate(value):
                yield from _leaves(each, f"{name or 'output'}-{index}")
        case dict():
            for key, each in value.items():
                yield from _leaves(each, f"{name}-{key}" if name else str(key))
        case _:
            yield name or "output-0", value


# --- TorchScript -----------------------------------------------------------------------------------------


def _load_script(torch: Any, path: Path, spec: ModelSpec) -> Any:
    if not _is_torchscript(path):
        raise ModelFailed(
            f"'{path.name}' is not a TorchScript archive; if it holds a state_dict or a pickled module, save the "
            "network with torch.export.save(torch.export.export(...), 'model.pt2') or "
            "torch.jit.script(network).save(...), or build it in a model.py that loads the weights"
        )
    check_operators(path, spec, lambda: _side_effects(torch, path))  # before it is loaded, which may run its code
    # The deprecation concerns the author of the file. Filters belong to the process, so models that load in other
    # threads would restore each other's.
    warnings.filterwarnings("ignore", message="`torch.jit.load` is deprecated", category=DeprecationWarning)
    with PYTORCH_LOADS:
        return torch.jit.load(path, map_location="cpu").eval()


# Operators that read or write files or call other processes, and namespaces of classes that do. TorchScript can call
# them as functions and as methods, and name them in `getattr`.
_SIDE_EFFECTS = frozenset({"from_file", "save", "rpc_sync", "rpc_async", "rpc_remote", "dist_rpc", "c10d"})
# Namespaces of `ops` that compute only. Others exist if their library is loaded, such as `image` of torchvision.
_COMPUTING = frozenset(
    {"aten", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "prim", "quantized", "_quantized", "sparse", "torchvision"}
)
# What PyTorch writes into an archive. Comments, strings in triple quotes and lines that continue after a backslash are
# not among it: without them, PyTorch cannot read other words in a file than these patterns.
_TOKEN = re.compile(
    rb"""(?P<string>"(?:[^"\\\n]|\\.)*"(?!")|'(?:[^'\\\n]|\\.)*'(?!'))
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<other>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?j?(?![A-Za-z0-9_])|->|\.\.\.|[][(){}:,;.=+*/%@&|^~<>!-])
    |[ \t\r\n]+""",
    re.VERBOSE,
)


def _side_effects(torch: Any, path: Path) -> set[str]:
    """Return the operators in the code of an archive that do more than compute. Raises ModelFailed.

    The archive is read by PyTorch itself, so that this is the code that it would run.
    """
    found: set[str] = set()
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        namespaces = {str(schema.name).partition("::")[0] for schema in torch._C._jit_get_all_schemas()} - _COMPUTING
        for name in reader.get_all_records():
            if name.endswith(".py"):
                found |= _operators_in(reader.get_record(name), namespaces)
            elif name.endswith("model.json"):
                raise ValueError("it has the format of PyTorch before 1.1; save it again")
    except (RuntimeError, ValueError) as error:
        raise ModelFailed(f"the code of '{path.name}' cannot be read: {error}") from error
    return found


def _operators_in(source: bytes, namespaces: Set[str]) -> set[str]:
    """Return the operators in a file of TorchScript that do more than compute, and uses of `ops` with one of these
    namespaces. `torch` itself is among them where it is a value: each operator can be had from it. Raises ValueError.
    """
    tokens = ["", *_tokens(source), "", "", ""]
    words = {token.strip("'") for token in tokens}
    found = words & _SIDE_EFFECTS
    for index, name in enumerate(tokens):
        if name not in ("torch", "ops") or tokens[index - 1] == ".":
            continue
        dot, namespace, second_dot = tokens[index + 1 : index + 4]
        if name == "torch":
            found |= set() if dot == "." else {name}
        else:  # as a value it may get any other name
            found |= {f"ops.{each}" for each in ({namespace} if dot == second_dot == "." else words) & namespaces}
    return found


def _tokens(source: bytes) -> Iterator[str]:
    """Yield the names, operators and numbers of a file of TorchScript, and strings in single quotes: neighbours joined,
    without escapes. Raises ValueError for what PyTorch does not write."""
    strings = b""
    position = 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            raise ValueError(f"unexpected {source[position : position + 20]!r}")
        position = match.end()
        if match.lastgroup == "string":
            strings += _ESCAPE.sub(lambda found: _unescape(found[1]), match[0][1:-1])
        elif match.lastgroup is not None:
            if strings:
                yield f"'{strings.decode(errors='replace')}'"
                strings = b""
            yield match[0].decode()


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)")


def _unescape(escape: bytes) -> bytes:
    """Return the character of an escape of TorchScript, whose letters stand for control characters."""
    if escape[:1] == b"x" and len(escape) == 3:
        return bytes([int(escape[1:], 16)])
    return bytes([int(escape, 8) & 255]) if escape.isdigit() and escape < b"8" else b"?"


def _is_torchscript(path: Path) -> bool:
    """Return whether a file is a TorchScript archive, which holds code and constants, not pickled weights."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        # The first folder of every name is the archive's own name.
        names = {name.partition("/")[2] for name in archive.namelist()}
    return "constants.pkl" in names and any(name.startswith("code/") for name in names)


def _script_program(module: Any, path: Path, spec: ModelSpec) -> _Program:
    """Return the interface of a TorchScript program. Raises ModelFailed for arguments that no tensor can be."""
    schema = module.forward.schema
    inputs, scalars = [], set()
    absent: dict[str, None] = {}
    for argument in schema.arguments[1:]:  # the first one is the module itself
        kind = str(argument.type)
        inner = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        optional = argument.has_default_value() or inner != kind
        if inner == "Tensor":
            inputs.append(TensorSpec(argument.name, optional=optional))
        elif inner in _SCALARS:
            datatype, accepts = _SCALARS[inner]
            inputs.append(TensorSpec(argument.name, datatype, (), accepts, optional))
            scalars.add(argument.name)
        elif not optional:
            raise ModelFailed(
                f"'{path.name}': argument '{argument.name}' of forward is {kind}; expected a tensor, "
                f"{', '.join(_SCALARS)}, or a default value"
            )
        if optional and not argument.has_default_value():
            absent[argument.name] = None
    outputs = _script_outputs(schema.returns[0].type)
    signature = Signature(
        tuple(inputs),
        tuple(outputs or ()),
        open_outputs=not outputs,
        batched=spec.max_batch_size > 1,
        outputs_are_hints=True,
    )
    return _Program(signature, frozenset(scalars), lambda values: ((), {**absent, **values}))


def _script_outputs(kind: Any, name: str = "") -> list[TensorSpec] | None:
    """Return the outputs, those in tuples by position; None if the program returns a dict or list, of unknown size."""
    match kind.kind():
        case "TensorType":
            return [TensorSpec(name or "output-0")]
        case "TupleType":
            parts = [_script_outputs(each, f"{name or 'output'}-{i}") for i, each in enumerate(kind.elements())]
            return None if None in parts else [spec for part in parts for spec in part or ()]
        case "IntType" | "FloatType" | "BoolType" | "StringType":
            return [TensorSpec(name or "output-0", _SCALARS[str(kind)][0], ())]
    return None


# --- torch.export ----------------------------------------------------------------------------------------


def _load_export(torch: Any, path: Path) -> tuple[Any, Any]:
    """Return an exported program and its module."""
    try:
        with PYTORCH_LOADS:
            program = torch.export.load(path)
            return program, program.module()
    except Exception as error:  # torch.export documents no class of error
        raise ModelFailed(f"'{path.name}' cannot be loaded by torch.export.load: {error}") from error


def _exported_program(torch: Any, program: Any) -> _Program:
    """Return the interface of an exported program. Numbers that it was exported with are part of the program."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    leaves = program.graph_signature.user_inputs
    names = dict(zip(_leaf_names(program.call_spec.in_spec, leaves), leaves, strict=True))
    inputs = {name: node for name, node in names.items() if isinstance(node, str) and node in values}
    outputs = _output_names(program.call_spec.out_spec)
    named_out = [*zip(outputs, program.graph_signature.user_outputs, strict=True)]
    tensors = {name: values[node] for name, node in inputs.items()}
    scalars = {name for name, value in tensors.items() if not hasattr(value, "dtype")}
    rows = {_rows(value) for value in (*tensors.values(), *(_value(values, node) for _, node in named_out))}
    signature = Signature(
        inputs=tuple(_tensor_spec(name, value) for name, value in tensors.items()),
        outputs=tuple(_tensor_spec(name, _value(values, node)) for name, node in named_out),
        batched=len(rows) == 1 and "" not in rows,
        outputs_are_hints=True,
    )
    unflatten, spec = torch.utils._pytree.tree_unflatten, program.call_spec.in_spec

    def arguments(given: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        positional, named = unflatten([given[n] if n in inputs else leaf for n, leaf in names.items()], spec)
        return positional, named

    return _Program(signature, frozenset(scalars), arguments)


def _leaf_names(in_spec: Any, leaves: Sequence[Any]) -> list[str]:
    """Return a name for each leaf of the arguments: keyword arguments by their keys, others by their nodes."""
    positional, keywords = in_spec.children()
    names = [str(leaf) for leaf in leaves]
    at = positional.num_leaves
    for key, each in zip(keywords.context or (), keywords.children(), strict=True):
        if each.is_leaf():
            names[at] = str(key)
        at += each.num_leaves
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]


def _output_names(out_spec: Any, name: str = "") -> list[str]:
    """Return a name for each leaf of the result, as `_leaves` names it."""
    if out_spec.is_leaf():
        return [name or "output-0"]
    if out_spec.type is dict:
        parts = [(f"{name}-{key}" if name else str(key)) for key in out_spec.context]
    else:
        parts = [f"{name or 'output'}-{i}" for i in range(len(out_spec.children()))]
    return [leaf for part, each in zip(parts, out_spec.children(), strict=True) for leaf in _output_names(each, part)]


def _value(values: Mapping[str, Any], node: Any) -> Any:
    """Return what is known of an output: of a node, or a number that is part of the program."""
    return values.get(node) if isinstance(node, str) else node


def _tensor_spec(name: str, value: Any) -> TensorSpec:
    if hasattr(value, "dtype"):
        shape = tuple(n if isinstance(n, int) else -1 for n in value.shape)
        return TensorSpec(name, _DATATYPES.get(str(value.dtype)), shape)
    kind = type(value).__name__.removeprefix("Sym").lower()  # such as a SymInt
    if kind not in _SCALARS:
        return TensorSpec(name)
    datatype, accepts = _SCALARS[kind]
    return TensorSpec(name, datatype, (), accepts)


def _rows(value: Any) -> str:
    """Return the symbol of a tensor's first axis; "" if it is fixed or missing."""
    shape = getattr(value, "shape", ())
    return str(shape[0]) if shape and not isinstance(shape[0], int) else ""


RUNTIME = Runtime(
    load=TorchModel,
    packages=("torch",),
    extra="torch",
    suffixes=(".pt2",),
    shared_suffixes=(".pt", ".pth", ".ts", ".jit", ".ptl", ".torchscript"),
    is_model_file=_is_torchscript,
    expected=(
        "a program of TorchScript or torch.export, not weights or a module that torch.save has pickled; write one by "
        "torch.jit.script(module).save(file) or torch.export.save(program, 'model.pt2')"
    ),
    placement="thread",
)
