"""Names of pandas dtypes in the parameters of a column."""

import importlib
import re
from typing import Any

from dragoman.codecs.elements import content_error
from dragoman.core.errors import InvalidInput

try:
    pd: Any = importlib.import_module("pandas")
except ImportError as missing:
    raise ImportError(
        f"content type 'pd' needs the package 'pandas' ({missing}); pip install 'dragoman[pandas]'"
    ) from missing

# Parameters of a column: its dtype where datatype and content type do not imply it; the categories of a categorical.
DTYPE = "pandas_dtype"
CATEGORIES = "pandas_categories"
CATEGORIES_DTYPE = "pandas_categories_dtype"
ORDERED = "pandas_ordered"

# Default dtype of text: `str` since pandas 3, before `object`.
TEXT_DTYPE: Any = pd.Series(["text"]).dtype

_MASKED = re.compile(r"U?Int(8|16|32|64)|Float(32|64)|boolean")
_DATETIMES = re.compile(r"datetime64\[(s|ms|us|ns)(, [\w/+:. -]{1,64})?\]", re.ASCII)
_TIMEDELTAS = re.compile(r"timedelta64\[(s|ms|us|ns)\]")
_TEXTS = re.compile(r"str|string(\[\w+\])?|object")


def dtype_name(dtype: Any, where: str) -> str:
    """Return the name of a dtype that `dtype_of` converts back. Raises InvalidInput if there is none."""
    for name in (str(dtype), f"{dtype}[{getattr(dtype, 'storage', '')}]"):
        try:
            if family_of(name) and pd.api.types.pandas_dtype(name) == dtype:
                return name
        except (TypeError, ValueError, KeyError):
            continue
    raise InvalidInput(f"{where}: pandas dtype {dtype} is not supported: convert the column first")


def family_of(name: str) -> str:
    """Return the family of a dtype name: masked, datetime, timedelta or text; "" for any other name."""
    families = {"masked": _MASKED, "datetime": _DATETIMES, "timedelta": _TIMEDELTAS, "text": _TEXTS}
    return next((family for family, pattern in families.items() if pattern.fullmatch(name)), "")


def dtype_of(name: str, where: str) -> Any:
    """Return the dtype that the parameters of a column name. Raises InvalidInput for an unknown name."""
    try:
        return pd.api.types.pandas_dtype(name)
    except (TypeError, ValueError, KeyError) as error:
        raise content_error(where, "pd", f"unknown '{DTYPE}' {name!r}") from error
