"""One side of the codec benchmark, a process in the environment of the package that it measures.

It reads lines of JSON, `{"what": ..., "times": n}`, and writes one line for each: n durations in ms for each way, each
of a new request. `values` is a digest of the decoded values, to compare both sides. It imports no other benchmark,
because these are not installed in its environment.

usage: python codec_times.py dragoman|mlserver
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

ROWS = 10_000


def cases() -> dict[str, Any]:
    """What is encoded, the same on both sides."""
    rng = np.random.default_rng(0)
    frame = {
        **{f"f{i}": rng.standard_normal(ROWS) for i in range(4)},
        **{f"i{i}": rng.integers(0, 1 << 40, ROWS) for i in range(3)},
        **{f"s{i}": [f"value {j}" for j in range(ROWS)] for i in range(3)},
    }
    return {
        "frame": pd.DataFrame(frame),
        "array": rng.standard_normal((1000, 1000)).astype(np.float32),
        "strings": [f"value {j}" for j in range(ROWS)],
    }


def digest(value: Any) -> str:
    """The same for equal values, whichever package made them."""
    if isinstance(value, pd.DataFrame):
        parts = [f"{name}{digest(value[name].to_numpy())}" for name in value.columns]
        return hashlib.sha256("".join(parts).encode()).hexdigest()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return hashlib.sha256(str(value.shape).encode() + np.ascontiguousarray(value).tobytes()).hexdigest()
    return hashlib.sha256("\0".join(map(str, value)).encode()).hexdigest()


Way = tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]


def dragoman(what: str) -> dict[str, Way]:
    """The ways by name: what encodes a value, what of that goes over a wire, and what decodes it."""
    from dragoman.codecs import NumpyRequestCodec, PandasCodec, StringRequestCodec
    from dragoman.formats.message import InferenceRequest

    codec: Any = {"frame": PandasCodec, "array": NumpyRequestCodec, "strings": StringRequestCodec}[what]
    return {
        "JSON": (
            lambda value: codec.encode_request(value).to_json(),
            lambda text: (text, None),
            lambda came: codec.decode_request(InferenceRequest.from_json(*came)),
        ),
        "binary": (
            lambda value: codec.encode_request(value).to_binary(),
            lambda made: (b"".join(made[0]), str(made[1])),
            lambda came: codec.decode_request(InferenceRequest.from_json(*came)),
        ),
    }


def mlserver(what: str) -> dict[str, Way]:
    from mlserver.codecs import NumpyRequestCodec, PandasCodec, StringCodec
    from mlserver.codecs.json import decode_from_bytelike_json_to_dict, encode_to_json_bytes
    from mlserver.types import InferenceRequest

    codec: Any = {"frame": PandasCodec, "array": NumpyRequestCodec}.get(what)

    def encode(value: Any) -> Any:
        if codec is not None:
            return encode_to_json_bytes(codec.encode_request(value).model_dump())
        made = InferenceRequest(inputs=[StringCodec.encode_input("s", value, use_bytes=False)])
        return encode_to_json_bytes(made.model_dump())

    def decode(came: Any) -> Any:
        request = InferenceRequest(**decode_from_bytelike_json_to_dict(came[0]))
        return StringCodec.decode_input(request.inputs[0]) if codec is None else codec.decode_request(request)

    return {"JSON": (encode, lambda text: (text, None), decode)}


def measured(value: Any, ways: dict[str, Way], times: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (encode, sent, decode) in ways.items():
        came = sent(encode(value))
        found[name] = {
            "encode_ms": [timed(encode, value) for _ in range(times)],
            "decode_ms": [timed(decode, came) for _ in range(times)],
            "bytes": len(came[0]),
            "values": digest(decode(came)),
        }
    return found


def timed(run: Callable[[Any], Any], given: Any) -> float:
    began = time.perf_counter()
    made = run(given)
    took_ms = (time.perf_counter() - began) * 1e3
    del made
    return took_ms


def main() -> None:
    ways = {"dragoman": dragoman, "mlserver": mlserver}[sys.argv[1]]
    values = cases()
    for line in sys.stdin:
        command = json.loads(line)
        what = command["what"]
        answer = {"ways": measured(values[what], ways(what), command["times"]), "wanted": digest(values[what])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
