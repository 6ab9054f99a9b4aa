"""Class names that files and estimators hold."""

import ast
import re
from collections.abc import Mapping
from typing import Any

_MAX_CHARACTERS = 1_000_000
MAX_CLASSES = 100_000
# Python parses any expression before `literal_eval` refuses it: the tree of a chain is 400 times its text.
_STRING = re.compile(
    r"""
    \#[^\r\n]*+
    |(?i:[rub]{0,2})(?:
        \"{3}[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+(?:\"{3})?
        |'{3}[^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*+(?:'{3})?
        |"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"?
        |'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'?
    )""",
    re.DOTALL | re.VERBOSE,
)
_EMPTY_SET = re.compile(r"(?<![\w.])set[\s\\]*\([\s\\]*\)")
_NOT_LITERAL = re.compile(  # of a text whose strings are replaced by "
    r"""
    [^\w\s.,:()\[\]{}+\-"\\]  # an operator
    |(?<![\w.])(?!(?:True|False|None)\b)[^\W\d]  # a name or keyword
    |\.\w+\.  # attributes of attributes
    |[\w.")\]}][\s\\]*[(\[{]  # a call or subscript
    |[")\]}][\s\\]*[\w.]|[\w.][\s\\]+[\w.]|[)\]}][\s\\]*"  # a value without a comma before it
    |(?:[+\-][^,:\[\]{}+\-]*){5}  # a sum: a complex number has up to four signs, two of exponents
    """,
    re.VERBOSE,
)
_KEYS = ("names", "class_names", "classes", "labels", "id2label")


def parse_names(text: str) -> tuple[str, ...]:
    """Return class names from a text in the metadata of a file: a literal list, or dict by index, of Python or JSON.

    It is parsed, never executed. Empty if it is anything else.
    """
    if len(text) > _MAX_CHARACTERS or text.count(",") > MAX_CLASSES or not _is_like_literal(text):
        return ()  # the tree of a parsed text takes much memory
    try:
        return names_of(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ()


def _is_like_literal(text: str) -> bool:
    """Return False for a text that has operators, names, calls or attributes outside of its strings and comments."""
    plain = _STRING.sub(lambda found: " " if found[0][0] == "#" else '"', text)
    return not _NOT_LITERAL.search(_EMPTY_SET.sub('"', plain))


def names_of(value: Any) -> tuple[str, ...]:
    """Return class names from a list, or from a dict by index (`id2label`); empty if it is neither or has gaps."""
    if isinstance(value, Mapping):
        try:
            by_index = {int(index): name for index, name in value.items() if isinstance(index, int | str)}
        except ValueError:
            return ()
        value = [by_index[i] for i in range(len(by_index))] if by_index.keys() == {*range(len(value))} else ()
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_CLASSES:
        return ()
    return tuple(map(str, value)) if all(isinstance(name, str | int) for name in value) else ()


def names_in_metadata(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the class names in the metadata of a file, as exporters of classifiers and detectors write them."""
    return next((names for key in _KEYS if (names := parse_names(metadata.get(key, "")))), ())


def estimator_kind(estimator: Any) -> str:
    """Return the kind of an estimator with the interface of scikit-learn, "" if it does not say it."""
    try:
        kind = getattr(estimator, "_estimator_type", None) or estimator.__sklearn_tags__().estimator_type
    except Exception:  # code of any library
        kind = None
    known = {"clusterer": "clustering", "outlier_detector": "outliers", "classifier": "classifier"}
    if kind in known or kind == "regressor":
        return known.get(str(kind), "regressor")
    return "preprocessor" if callable(getattr(estimator, "transform", None)) and not _predicts(estimator) else ""


def _predicts(estimator: Any) -> bool:
    return callable(getattr(estimator, "predict", None))
