"""Tensors to Python values and back, one file a content type."""

import importlib
from typing import Any

# Imported when first used: pandas and Pillow need not be installed.
_HOME = {
    "CODECS": "registry",
    "InputCodec": "codec",
    "RequestCodec": "codec",
    "NumpyCodec": "numpy",
    "NumpyRequestCodec": "numpy",
    "PandasCodec": "pandas",
    "StringCodec": "string",
    "StringRequestCodec": "string",
    "Base64Codec": "base64",
    "DatetimeCodec": "datetime",
    "PillowImageCodec": "image",
    "PandasJsonCodec": "json",
    "JsonCodec": "json",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"dragoman.codecs.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dragoman.codecs' has no attribute '{name}'")
