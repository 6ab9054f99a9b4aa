"""The content type `pd`."""

import sys
from typing import Any

from dragoman.compat.mlserver.codecs.adapted import AdaptedRequest
from dragoman.compat.mlserver.codecs.base import register_request_codec


class _DataFrame:
    """The class of data frames. Who annotates with it has imported pandas; for all others that would cost time."""

    def __get__(self, _instance: object, _owner: type | None = None) -> Any:
        return getattr(sys.modules.get("pandas"), "DataFrame", type(None))


@register_request_codec
class PandasCodec(AdaptedRequest):
    """Data frames: one input or output a column."""

    ContentType = "pd"
    JsonContentType = "pd_json"
    TypeHint = _DataFrame()
