"""Content type `pd`."""

import sys
from typing import Any

from dragoman.compat.mlserver.codecs.adapted import AdaptedRequestCodec
from dragoman.compat.mlserver.codecs.base import register_request_codec


class _DataFrame:
    """The class pd.DataFrame if pandas has been imported: importing it only for this would take time."""

    def __get__(self, _instance: object, _owner: type | None = None) -> Any:
        return getattr(sys.modules.get("pandas"), "DataFrame", type(None))


@register_request_codec
class PandasCodec(AdaptedRequestCodec):
    """Data frames, one input or output per column."""

    ContentType = "pd"
    JsonContentType = "pd_json"
    TypeHint = _DataFrame()
