"""JSON that is small on the wire and large, or slow, once it is parsed."""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.attack.attack import Attack, Target
from benchmarks.attack.http import post

_MIB = 1 << 20
_JSON = 16 * _MIB  # the default of max_json_bytes
_FP64 = 8  # bytes
_TENSORS = 3  # of a model in a process: the input, the output, and the copy of the output for the server
_TEXT = ("doubled", "tiny-llama")
# List elements that a body repeats up to its size.
_FILLERS: Mapping[str, bytes] = {
    "lists": b"[]",
    "objects": b'{"a":{}}',
    "texts": b'"ab"',
    "numbers": b"1",
}


def fill(head: bytes, filler: bytes, tail: bytes, size: int) -> bytes:
    """Return a body of about `size` bytes with a list of equal elements."""
    count = (size - len(head) - len(tail) - 2) // (len(filler) + 1)
    return b"".join((head, b"[", b",".join([filler] * count), b"]", tail))


def keys(size: int) -> bytes:
    """Return a JSON object of about `size` bytes with many keys."""
    return b"{" + b",".join([b'"%07d":0' % n for n in range((size - 2) // 12)]) + b"}"


def tensor(data: bytes, shape: str, datatype: str = "FP32") -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"%s","shape":%s,"data":%s}]}' % (
        datatype.encode(),
        shape.encode(),
        data,
    )


def nested(size: int, shape: str = "", datatype: str = "FP32") -> bytes:
    """Return an inference request of about `size` bytes in rows of one element, with the matching or another shape."""
    row = b'["a"]' if datatype == "BYTES" else b"[1]"
    count = (size - 100) // (len(row) + 1)
    return tensor(b"[" + b",".join([row] * count) + b"]", shape or f"[{count},1]", datatype)


def flat(size: int, element: bytes, datatype: str) -> bytes:
    """Return an inference request of about `size` bytes with a flat list and a matching shape."""
    count = (size - 100) // (len(element) + 1)
    shape = f"[{count}]" if datatype == "BYTES" else f"[1,{count}]"
    return tensor(b"[" + b",".join([element] * count) + b"]", shape, datatype)


def _attack(
    name: str,
    about: str,
    path: str,
    body: Callable[[], bytes],
    size: int,
    models: tuple[str, ...] = ("doubled", "Rows"),
    compressed: bool = True,
    content_type: str = "application/json",
    numbers: int = 0,
    tensor_bytes: int = 0,
) -> Attack:
    """Return an attack with a body of `size` bytes after decompression, with `numbers` FP64 numbers for the model.

    `tensor_bytes` is the size of other legal tensors.
    """

    def run(target: Target) -> str:
        return post(target, path, body(), compressed=compressed, content_type=content_type)

    tensors = tensor_bytes or numbers * _FP64 * _TENSORS
    return Attack(name=f"json-{name}", about=about, run=run, body_bytes=size, tensor_bytes=tensors, models=models)


_ROWS = "/v2/models/Rows/infer"
_V2: list[Attack] = [
    _attack(
        "nested-plain",
        "20 MiB of `[1],[1],...` under shape [9,1]",
        _ROWS,
        partial(nested, 20 * _MIB, "[9,1]"),
        20 * _MIB,
        compressed=False,
    ),
    _attack(
        "nested-gzip-8",
        "gzip of 8 MiB of `[1],[1],...` under shape [9,1]",
        _ROWS,
        partial(nested, 8 * _MIB, "[9,1]"),
        8 * _MIB,
    ),
    _attack("nested-gzip-16", "gzip of 16 MiB of the same", _ROWS, partial(nested, _JSON, "[9,1]"), _JSON),
    _attack(
        "nested-unknown-model",
        "the same to a model that does not exist",
        "/v2/models/none/infer",
        partial(nested, _JSON, "[9,1]"),
        _JSON,
    ),
    _attack(
        "nested-right-shape",
        "16 MiB of `[1],[1],...` under its own shape",
        _ROWS,
        partial(nested, _JSON),
        _JSON,
    ),
    _attack(
        "nested-texts",
        '16 MiB of `["a"],...` of datatype BYTES',
        "/v2/models/Texts/infer",
        partial(nested, _JSON, "", "BYTES"),
        _JSON,
        ("doubled", "Texts"),
    ),
    _attack(
        "texts",
        "as many texts of one letter as a BYTES tensor may have",
        "/v2/models/Texts/infer",
        partial(flat, 4 * _MIB, b'"a"', "BYTES"),
        4 * _MIB,
        ("doubled", "Texts"),
    ),
    _attack(
        "one-text",
        "a text of 16 MiB of datatype BYTES",
        "/v2/models/Texts/infer",
        lambda: tensor(b'["' + b"a" * (_JSON - 200) + b'"]', "[1]", "BYTES"),
        _JSON,
        ("doubled", "Texts"),
    ),
    _attack(
        "flat-fp32",
        "16 MiB of one-digit numbers, FP32",
        _ROWS,
        partial(flat, _JSON, b"1", "FP32"),
        _JSON,
        tensor_bytes=6 * _JSON,  # the text while it is parsed, the input, and the text of the response: twice each
    ),
    _attack("flat-zeros", "16 MiB of `0.0,0.0,...`, FP32", _ROWS, partial(flat, _JSON, b"0.0", "FP32"), _JSON),
    _attack(
        "infer-stream",
        "16 MiB of `[1],[1],...` to infer_stream",
        "/v2/models/Rows/infer_stream",
        partial(nested, _JSON, "[9,1]"),
        _JSON,
    ),
]
_UNKNOWN_KEYS = [
    _attack(
        f"unknown-key-{name}",
        f"16 MiB of `{filler.decode()},...` under an unknown key",
        _ROWS,
        partial(fill, b'{"inputs":[],"x":', filler, b"}", _JSON),
        _JSON,
    )
    for name, filler in _FILLERS.items()
]
_PATHS: Mapping[str, tuple[str, bytes, tuple[str, ...]]] = {
    "completions": ("/v1/completions", b'{"model":"tiny-llama","prompt":"x","x":', _TEXT),
    "prompts": ("/v1/completions", b'{"model":"tiny-llama","prompt":', _TEXT),
    "chat": ("/v1/chat/completions", b'{"model":"tiny-llama","messages":', _TEXT),
    "embeddings": ("/v1/embeddings", b'{"model":"tiny-llama","input":', _TEXT),
    "responses": ("/v1/responses", b'{"model":"tiny-llama","input":', _TEXT),
    "messages": ("/v1/messages", b'{"model":"tiny-llama","max_tokens":1,"messages":', _TEXT),
    "count-tokens": ("/v1/messages/count_tokens", b'{"model":"tiny-llama","messages":', _TEXT),
    "ollama-chat": ("/api/chat", b'{"model":"tiny-llama","messages":', _TEXT),
    "ollama-generate": ("/api/generate", b'{"model":"tiny-llama","prompt":"x","context":', _TEXT),
    "ollama-embed": ("/api/embed", b'{"model":"tiny-llama","input":', _TEXT),
    "tgi-generate": ("/generate", b'{"inputs":"x","x":', _TEXT),
    "tokenize": ("/tokenize", b'{"inputs":"x","x":', _TEXT),
    "lmi-text": ("/invocations", b'{"inputs":', _TEXT),
    "v2-generate": ("/v2/models/tiny-llama/generate", b'{"text_input":"x","x":', _TEXT),
    "invocations": ("/invocations", b'{"instances":', ("doubled",)),
    "dataframe": ("/invocations", b'{"dataframe_records":', ("doubled",)),
    "umbridge-input": ("/Evaluate", b'{"name":"vector","input":', ("doubled", "vector")),
    "umbridge-config": ("/Evaluate", b'{"name":"vector","input":[[1]],"config":{"a":', ("doubled", "vector")),
    "umbridge-sizes": ("/InputSizes", b'{"name":"vector","config":{"a":', ("doubled", "vector")),
    "index": ("/v2/repository/index", b'{"parameters":', ("doubled",)),
    "load": ("/v2/repository/models/doubled/load", b'{"parameters":', ("doubled",)),
}


def _size(name: str) -> int:
    """Return the size of a body, which is limited to less than a body in general except for UM-Bridge."""
    return 60 * _MIB if name.startswith("umbridge") else _JSON


_OTHERS = [
    _attack(
        f"{name}-{kind}",
        f"{_size(name) // _MIB} MiB of `{filler.decode()},...` to {path}",
        path,
        partial(fill, head, filler, b"}" * head.count(b"{"), _size(name)),
        _size(name),
        models,
        # The tensors, and the list that is parsed.
        tensor_bytes=8 * _MIB * _FP64 * (_TENSORS + 1) if (name, kind) == ("invocations", "numbers") else 0,
    )
    for name, (path, head, models) in _PATHS.items()
    for kind, filler in _FILLERS.items()
    if kind in (("objects",) if models is _TEXT else ("lists", "numbers"))
]
_MORE = [
    _attack(
        "invocations-nested",
        "16 MiB of `[1],[1],...` as instances",
        "/invocations",
        partial(fill, b'{"instances":', b"[1]", b"}", _JSON),
        _JSON,
        ("doubled",),
        numbers=4 * _MIB,
    ),
    _attack("invocations-keys", "16 MiB of keys", "/invocations", partial(keys, _JSON), _JSON, ("doubled",)),
    _attack(
        "umbridge-vector",
        "a vector of 60 MiB",
        "/Evaluate",
        partial(fill, b'{"name":"vector","config":{"n":4},"input":[', b"1", b"]}", 60 * _MIB),
        60 * _MIB,
        ("doubled", "vector"),
        tensor_bytes=60 * _MIB + 30 * _MIB * _FP64,  # the body is there while it is parsed
    ),
    _attack(
        "umbridge-sens",
        "a vector `sens` of 60 MiB",
        "/Gradient",
        partial(fill, b'{"name":"vector","input":[[1]],"sens":', b"1", b"}", 60 * _MIB),
        60 * _MIB,
        ("doubled", "vector"),
        tensor_bytes=60 * _MIB + 30 * _MIB * _FP64,  # the body is there while it is parsed
    ),
    _attack(
        "tool-arguments",
        "15 MiB of `[],...` within the text of a tool call's arguments",
        "/v1/chat/completions",
        lambda: (
            b'{"model":"tiny-llama","messages":[{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":"['
            + b"[]," * (5 * _MIB)
            + b'1]"}}]}]}'
        ),
        15 * _MIB,
        _TEXT,
    ),
]
ATTACKS = (*_V2, *_UNKNOWN_KEYS, *_OTHERS, *_MORE)
