"""Codecs: tensors to Python values and back, one module per content type."""

import importlib
from typing import Any

# Imported on first use, because pandas and Pillow are optional.
_MODULES = {
    "CODECS": "codec",
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

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"dragoman.codecs.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'dragoman.codecs' has no attribute '{name}'")
