"""Process of the codec benchmark that measures one package, in the environment of that package.

It reads lines of JSON, `{"case": ..., "times": n}`, and writes one line for each: n durations in ms for each encoding,
each of a new request. `values` is a digest of the decoded values, to compare the packages. It imports no other
benchmark, because their dependencies are not installed in its environment.

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


def example_values() -> dict[str, Any]:
    """Return the values to encode, the same for both packages."""
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
    """Return a digest that is equal for equal values."""
    if isinstance(value, pd.DataFrame):
        parts = [f"{name}{digest(value[name].to_numpy())}" for name in value.columns]
        return hashlib.sha256("".join(parts).encode()).hexdigest()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return hashlib.sha256(str(value.shape).encode() + np.ascontiguousarray(value).tobytes()).hexdigest()
    return hashlib.sha256("\0".join(map(str, value)).encode()).hexdigest()


Encoding = tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]


def dragoman(case: str) -> dict[str, Encoding]:
    """Return the encodings by name: functions that encode a value, serialize it for the wire, and decode it."""
    from dragoman.codecs import NumpyRequestCodec, PandasCodec, StringRequestCodec
    from dragoman.formats.message import InferenceRequest

    codec: Any = {"frame": PandasCodec, "array": NumpyRequestCodec, "strings": StringRequestCodec}[case]
    return {
        "JSON": (
            lambda value: codec.encode_request(value).to_json(),
            lambda text: (text, None),
            lambda received: codec.decode_request(InferenceRequest.from_json(*received)),
        ),
        "binary": (
            lambda value: codec.encode_request(value).to_binary(),
            lambda result: (b"".join(result[0]), str(result[1])),
            lambda received: codec.decode_request(InferenceRequest.from_json(*received)),
        ),
    }


def mlserver(case: str) -> dict[str, Encoding]:
    from mlserver.codecs import NumpyRequestCodec, PandasCodec, StringCodec
    from mlserver.codecs.json import decode_from_bytelike_json_to_dict, encode_to_json_bytes
    from mlserver.types import InferenceRequest

    codec: Any = {"frame": PandasCodec, "array": NumpyRequestCodec}.get(case)

    def encode(value: Any) -> Any:
        if codec is not None:
            return encode_to_json_bytes(codec.encode_request(value).model_dump())
        result = InferenceRequest(inputs=[StringCodec.encode_input("s", value, use_bytes=False)])
        return encode_to_json_bytes(result.model_dump())

    def decode(received: Any) -> Any:
        request = InferenceRequest(**decode_from_bytelike_json_to_dict(received[0]))
        return StringCodec.decode_input(request.inputs[0]) if codec is None else codec.decode_request(request)

    return {"JSON": (encode, lambda text: (text, None), decode)}


def measure_case(value: Any, encodings: dict[str, Encoding], times: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (encode, transmit, decode) in encodings.items():
        received = transmit(encode(value))
        found[name] = {
            "encode_ms": [duration_ms(encode, value) for _ in range(times)],
            "decode_ms": [duration_ms(decode, received) for _ in range(times)],
            "bytes": len(received[0]),
            "values": digest(decode(received)),
        }
    return found


def duration_ms(run: Callable[[Any], Any], argument: Any) -> float:
    began = time.perf_counter()
    result = run(argument)
    took_ms = (time.perf_counter() - began) * 1e3
    del result
    return took_ms


def main() -> None:
    encodings = {"dragoman": dragoman, "mlserver": mlserver}[sys.argv[1]]
    values = example_values()
    for line in sys.stdin:
        command = json.loads(line)
        case = command["case"]
        response = {
            "encodings": measure_case(values[case], encodings(case), command["times"]),
            "expected": digest(values[case]),
        }
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    main()
