"""gRPC messages with typed contents, which protobuf's parser makes many times larger."""

import time

import grpc

from benchmarks.attack.attack import Attack, Target
from dragoman.core.datatypes import datatype as datatype_named
from dragoman.formats.grpc_messages import ModelInferRequest, length_delimited

_SIZE = 60 << 20
_FIELDS = {
    "bool": ("BOOL", 1, b"\x01"),
    "int64": ("INT64", 3, b"\x01"),
    "fp32": ("FP32", 6, b"\0\0\x80\x3f"),
}
_BYTES_CONTENTS = 8


def _message(datatype: str, count: int, contents: bytes, model: str = "Rows") -> bytes:
    head = ModelInferRequest(model_name=model)
    tensor = head.inputs.add(name="x", datatype=datatype, shape=[1, count])
    body = b"".join((tensor.SerializeToString(), *length_delimited(5, contents)))
    del head.inputs[:]
    return b"".join((head.SerializeToString(), *length_delimited(5, body)))


def _call(target: Target, message: bytes) -> str:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    began_s = time.monotonic()
    with grpc.insecure_channel(f"{target.host}:{target.grpc_port}", options=options) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message, timeout=120)
            found = "OK"
        except grpc.RpcError as error:
            found = f"{error.code().name} `{str(error.details())[:60]}`"
    return f"{found} after {time.monotonic() - began_s:.2f} s"


def _packed(kind: str) -> Attack:
    datatype, field, element = _FIELDS[kind]
    count = _SIZE // len(element)

    def run(target: Target) -> str:
        return _call(target, _message(datatype, count, b"".join(length_delimited(field, element * count))))

    about = f"60 MiB of `{kind}_contents` of {len(element)} byte each"
    tensor_bytes = _SIZE + count * datatype_named(datatype).size  # both are there while elements are decoded
    return Attack(
        name=f"grpc-{kind}",
        about=about,
        run=run,
        body_bytes=_SIZE,
        tensor_bytes=tensor_bytes,
        models=("doubled", "Rows"),
    )


def _many_bytes(target: Target) -> str:
    element = b"".join(length_delimited(_BYTES_CONTENTS, b""))
    return _call(target, _message("BYTES", 9, element * (_SIZE // 2), "Texts"))


def _many_inputs(target: Target) -> str:
    return _call(target, ModelInferRequest(model_name="Rows").SerializeToString() + b"\x2a\x00" * (_SIZE // 2))


ATTACKS = (
    *map(_packed, _FIELDS),
    Attack(
        name="grpc-bytes",
        about="60 MiB of empty `bytes_contents`",
        run=_many_bytes,
        body_bytes=_SIZE,
        models=("doubled", "Texts"),
    ),
    Attack(
        name="grpc-inputs",
        about="60 MiB of empty inputs",
        run=_many_inputs,
        body_bytes=_SIZE,
        models=("doubled", "Rows"),
    ),
)
