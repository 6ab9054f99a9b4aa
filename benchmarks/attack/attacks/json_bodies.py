"""JSON that is small on the wire and large, or slow, once it is parsed."""

from benchmarks.attack.attack import Attack, Target
from benchmarks.attack.http import post

_MIB = 1 << 20


def nested(size: int, shape: str = "[9,1]", model_input: str = "x") -> bytes:
    """An inference request of about `size` bytes whose data are rows of one number."""
    head = b'{"inputs":[{"name":"%s","datatype":"FP32","shape":%s,"data":[' % (model_input.encode(), shape.encode())
    return head + b",".join([b"[1]"] * ((size - len(head)) // 4)) + b"]}]}"


def _nested_gzip(target: Target) -> str:
    return post(target, "/v2/models/Rows/infer", nested(60 * _MIB), packed=True)


ATTACKS = (
    Attack(
        name="json-nested-gzip-60",
        about="gzip of 60 MiB of `[1],[1],...` under shape [9,1]",
        run=_nested_gzip,
        body_bytes=60 * _MIB,
        models=("doubled", "Rows"),
    ),
)
