"""Headers of CloudEvents, which MLServer adds to requests for models and to their responses."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

_TYPE = "io.seldon.serving.inference."
_SOURCE = "io.seldon.serving.deployment."
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class EventHeaders:
    """The headers for one model."""

    def __init__(self, model: str, server: str) -> None:
        namespace = _namespace()
        self._common = {
            "Ce-Specversion": "0.3",
            "Ce-Source": _SOURCE + (f"{server}.{namespace}" if namespace else server),
            "Ce-Modelid": model,
            "Ce-Inferenceservicename": server,
            "Ce-Endpoint": model,
            **({"Ce-Namespace": namespace} if namespace else {}),
        }

    def request(self, id_: str) -> Mapping[str, str]:
        return self._headers("request", id_)

    def response(self, id_: str) -> Mapping[str, str]:
        return self._headers("response", id_)

    def _headers(self, kind: str, id_: str) -> Mapping[str, str]:
        """Return the headers, without the id if a header cannot have it: text that is not printable ASCII."""
        ids = {"Ce-Id": id_, "Ce-Requestid": id_} if id_.isascii() and id_.isprintable() else {}
        return {**self._common, "Ce-Type": _TYPE + kind, **ids}


@cache
def _namespace() -> str:
    """Return the Kubernetes namespace of this process, "" outside of Kubernetes."""
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""
