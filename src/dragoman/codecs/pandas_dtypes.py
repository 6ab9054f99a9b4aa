"""What the parameters of a column say of its dtype in pandas."""

import importlib
import re
from typing import Any

from dragoman.codecs.elements import fault
from dragoman.core.errors import InvalidInput

try:
    pd: Any = importlib.import_module("pandas")
except ImportError as missing:
    raise ImportError(
        f"content type 'pd' needs the package 'pandas' ({missing}); pip install 'dragoman[pandas]'"
    ) from missing

# Of a column: its dtype, where its datatype and content type do not tell it; and what a categorical knows besides.
DTYPE = "pandas_dtype"
CATEGORIES = "pandas_categories"
CATEGORIES_DTYPE = "pandas_categories_dtype"
ORDERED = "pandas_ordered"

# What text becomes when nobody says otherwise: `str` since pandas 3, before it `object`.
TEXT: Any = pd.Series(["text"]).dtype

_MASKED = re.compile(r"U?Int(8|16|32|64)|Float(32|64)|boolean")
_DATES = re.compile(r"datetime64\[(s|ms|us|ns)(, [\w/+:. -]{1,64})?\]", re.ASCII)
_SPANS = re.compile(r"timedelta64\[(s|ms|us|ns)\]")
_TEXTS = re.compile(r"str|string(\[\w+\])?|object")


def dtype_name(dtype: Any, where: str) -> str:
    """The name of a dtype, from which `dtype_of` makes it again; InvalidInput where that cannot be."""
    for name in (str(dtype), f"{dtype}[{getattr(dtype, 'storage', '')}]"):
        try:
            if kind_of(name) and pd.api.types.pandas_dtype(name) == dtype:
                return name
        except (TypeError, ValueError, KeyError):
            continue
    raise InvalidInput(f"{where}: pandas dtype {dtype} has no form on the wire; convert it first")


def kind_of(name: str) -> str:
    """What family of dtypes a name belongs to; "" where there is none of that name here."""
    families = {"masked": _MASKED, "dates": _DATES, "spans": _SPANS, "text": _TEXTS}
    return next((family for family, pattern in families.items() if pattern.fullmatch(name)), "")


def dtype_of(name: str, where: str) -> Any:
    """The dtype that a column's parameters name; InvalidInput where there is none."""
    try:
        return pd.api.types.pandas_dtype(name)
    except (TypeError, ValueError, KeyError) as bad:
        raise fault(where, "pd", f"knows no '{DTYPE}' {name!r}") from bad
