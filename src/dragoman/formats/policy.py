"""What whoever reads and writes payloads decides: bounds, and how to tell numbers that JSON has no form for."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator decides for every protocol.

    nonfinite: how NaN and infinities go into JSON. `null`: NaN as null, infinities are refused; `literal`: as the
    bare words NaN, Infinity and -Infinity, which Python reads but JSON does not allow; `error`: refused.
    health_json: whether health endpoints answer a JSON body instead of an empty one.
    metrics_path: where measurements are told. metrics_as: by whose names those of texts are told too, "" by nobody's.
    max_json_depth, max_json_values, max_json_bytes: how deep JSON may nest, and how many values and bytes it may have
    outside of the data of tensors.
    max_rank, max_elements, max_bytes_elements, max_tensors: how many axes and elements a tensor, how many elements one
    of BYTES, and how many inputs or outputs a request may have.
    strict_parameters: whether a parameter of text generation that is not known is refused rather than named.
    trust_request_chat_template: whether a chat may bring a template of its own.
    max_sequences: how many texts may be generated at a time for one prompt.
    lmi_http_codes: statuses of LMI's errors that differ from its own, as name=status,...
    forward_headers: which headers of a request its model sees, in lower case; `*` stands for anything.
    """

    nonfinite: Literal["null", "literal", "error"] = "null"
    health_json: bool = False
    metrics_path: str = "/metrics"
    metrics_as: Literal["", "tgi"] = ""
    max_json_depth: int = 64
    max_json_values: int = 1 << 19
    max_json_bytes: int = 16 << 20
    max_rank: int = 32
    max_elements: int = 1 << 31
    max_tensors: int = 1024
    max_bytes_elements: int = 1 << 31
    strict_parameters: bool = False
    trust_request_chat_template: bool = False
    max_sequences: int = 16
    lmi_http_codes: str = ""
    forward_headers: tuple[str, ...] = ()

    def forwarded(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Those of the headers, whose names are in lower case, that models see; credentials stay out of their logs."""
        wanted = self.forward_headers
        return {n: v for n, v in headers.items() if n not in CREDENTIALS and any(fnmatchcase(n, p) for p in wanted)}
