"""Mutants of a module: mutmut's operators, without those that no test can or should notice."""

import re
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

# Calls whose arguments are texts for operators, or only for a type checker.
_LOGGERS = frozenset({"log", "logger"})
_TYPE_MAKERS = frozenset({"TypeVar", "ParamSpec", "NewType", "getLogger"})
# Every mutant of these arguments fails at once, in any test: they would only raise the score.
_TRIVIAL_CALLS = frozenset({"len", "isinstance"})
# white space in patterns has no position
_NEVER_VISITED = (
    cst.Annotation,
    cst.Decorator,
    cst.Import,
    cst.ImportFrom,
    cst.Assert,
    cst.BaseParenthesizableWhitespace,
)
# A constant that only chooses between two ways to the same result: `_FEW = 16  # performance only: ...`.
_THRESHOLD = re.compile(r"^(\w+) = .*# performance only\b", re.M)


@dataclass(frozen=True)
class Mutant:
    """One change of one module; `before` and `after` are the changed line, which may run when it is imported."""

    module: str
    line: int
    statement: int
    is_imported: bool
    before: str
    after: str
    source: str


class Mutants:
    """The mutants of a file, in the order of its lines; each is rendered when asked for."""

    def __init__(self, path: Path, module: str) -> None:
        self.module = module
        self._text = path.read_text()
        wrapper = MetadataWrapper(cst.parse_module(self._text))
        visitor = _Visitor(_thresholds(path))
        wrapper.visit(visitor)
        self._tree = wrapper.module
        self._found = visitor.found

    def __len__(self) -> int:
        return len(self._found)

    def render(self, index: int) -> Mutant | None:
        """One mutant; None where the change gives no other valid module."""
        (line, statement, is_imported), node, changed = self._found[index]
        mutated = self._tree.deep_replace(node, changed)
        assert isinstance(mutated, cst.Module)
        source = mutated.code
        if source == self._text or not _compiles(source):
            return None
        pairs = zip(self._text.splitlines(), source.splitlines(), strict=False)
        before, after = next((a, b) for a, b in pairs if a != b)
        return Mutant(self.module, line, statement, is_imported, before.strip(), after.strip(), source)


def _thresholds(module: Path) -> frozenset[str]:
    """Return the marked constants that a module can use: its own, and the public ones of its package."""
    found = ((path, name) for path in module.parent.glob("*.py") for name in _THRESHOLD.findall(path.read_text()))
    return frozenset(name for path, name in found if path == module or not name.startswith("_"))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Visitor(cst.CSTVisitor):  # type: ignore[misc]
    """Collects `((line, line of its statement, whether it is imported), node, changed node)`.

    It skips, by rule: annotations, decorators, class headers, imports, docstrings, calls of a logger, `assert`,
    `zip(..., strict=True)`, the first argument of `cast`, type aliases and type variables, `__slots__`, `False` into
    `None`, the arguments of `len` and `isinstance`, and constants that only choose between two ways to the same result.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, thresholds: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._thresholds = thresholds
        self.found: list[tuple[tuple[int, int, bool], cst.CSTNode, cst.CSTNode]] = []
        self._statement = 0
        self._functions = 0  # around the node; the header of the outermost one runs when the module is imported
        self._in_header = False

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _NEVER_VISITED) or _is_text(node) or _is_type(node) or _is_trivial(node):
            return False
        if self._compares_threshold(node) or self._sets_threshold(node):
            return False
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statement = self.get_metadata(PositionProvider, node).start.line
            self._in_header = isinstance(node, cst.FunctionDef) and not self._functions
        if isinstance(node, cst.FunctionDef):
            self._functions += 1
        if isinstance(node, cst.ClassDef):  # the class header holds bases and options only
            node.body.visit(self)
            return False
        if isinstance(node, cst.Call) and _name(node.func) == "cast":
            node.args[1].value.visit(self)
            return False
        if not _is_strict_zip(node) and not (isinstance(node, cst.IfExp) and self._compares_threshold(node.test)):
            self._mutate(node)
        return not (isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict")

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef):
            self._functions -= 1
        super().on_leave(original_node)

    def _compares_threshold(self, node: cst.CSTNode) -> bool:
        if not isinstance(node, cst.Comparison):
            return False
        sides = [node.left, *(target.comparator for target in node.comparisons)]
        return any(map(self._is_threshold, sides))

    def _is_threshold(self, node: cst.CSTNode) -> bool:
        """Return whether this is a threshold, or a choice of two."""
        if isinstance(node, cst.IfExp):
            return self._is_threshold(node.body) and self._is_threshold(node.orelse)
        return _last_name(node) in self._thresholds

    def _sets_threshold(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Assign) and _name(node.targets[0].target) in self._thresholds

    def _mutate(self, node: cst.CSTNode) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        at = line, self._statement or line, self._in_header or not self._functions
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                changes = [changed for changed in operator(node) if not _is_false_to_none(node, changed)]
                # one mutant of a text is enough: its lower and upper case would only count it three times
                selected = changes[:1] if isinstance(node, cst.SimpleString) else changes
                self.found.extend((at, node, changed) for changed in selected)


def _is_false_to_none(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Return whether None replaces False, which no condition distinguishes; True replaces it in another mutant."""
    if isinstance(node, cst.Assign | cst.AnnAssign) and isinstance(changed, cst.Assign | cst.AnnAssign):
        return node.value is not None and _name(node.value) == "False"
    if isinstance(node, cst.Call) and isinstance(changed, cst.Call) and len(node.args) == len(changed.args):
        pairs = zip(node.args, changed.args, strict=True)
        return any(_name(a.value) == "False" and _name(b.value) == "None" for a, b in pairs)
    return False


def _name(node: cst.CSTNode) -> str:
    return node.value if isinstance(node, cst.Name) else ""


def _last_name(node: cst.CSTNode) -> str:
    """Return the name of a variable, or of an attribute of a module: `LONG` of `simd.LONG`."""
    return _name(node.attr if isinstance(node, cst.Attribute) else node)


def _is_text(node: cst.CSTNode) -> bool:
    """Whether it is a docstring, or a call that only writes to the log."""
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString):
        return True
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return False
    return _name(node.func.value) in _LOGGERS


def _is_type(node: cst.CSTNode) -> bool:
    """Whether an assignment only names a type, a logger or the slots of a class."""
    if not isinstance(node, cst.Assign):
        return False
    target, value = node.targets[0].target, node.value
    if _name(target) in ("__slots__", "__all__"):
        return True
    if isinstance(value, cst.Call):
        name = value.func.attr.value if isinstance(value.func, cst.Attribute) else _name(value.func)
        return name in _TYPE_MAKERS
    # an alias: `Key = tuple[Any, ...]`, `Number = int | float`; constants are upper case
    named = _name(target).lstrip("_")
    return named[:1].isupper() and not named.isupper() and isinstance(value, cst.Subscript | cst.BinaryOperation)


def _is_trivial(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and _name(node.func) in _TRIVIAL_CALLS


def _is_strict_zip(node: cst.CSTNode) -> bool:
    """Whether it is `zip(..., strict=True)`: the option asserts, as `assert` does, what cannot be otherwise."""
    return isinstance(node, cst.Call) and any(a.keyword is not None and a.keyword.value == "strict" for a in node.args)
