"""Arguments of the kernels: the structures of blocks.h, product.h, attention.h and step.h in dragoman_kernels/c."""

import ctypes

_ADDRESS, _INTEGER = ctypes.c_void_p, ctypes.c_int64

# Bytes of `shared_loop` in share.h.
COUNTER_BYTES = 128
# Products of more rows are computed in panels of this many.
PANEL_ROWS = 96
# Rows of one adapter that are computed together, and the multiple that ranks are padded to: adapter.h.
ADAPTED_ROWS, RANKS = 4, 4
# The linear layers of a decoder's layer in the order of step.h, by their names in `FusedModel`.
LINEAR_LAYERS = ("qkv", "out", "gate_up", "down")


class Segment(ctypes.Structure):
    """`segment`: rows of weights of one tensor in blocks."""

    _fields_ = (
        ("type", _INTEGER),
        ("weights", _ADDRESS),
        *((name, _INTEGER) for name in ("columns", "row_bytes", "first", "head")),
    )


class BlockLayer(ctypes.Structure):
    """`block_layer`: tensors in blocks with the same inputs."""

    _fields_ = (
        ("segments", _ADDRESS),
        ("bias", _ADDRESS),
        *((name, _INTEGER) for name in ("size", "blocks", "rounds", "floats")),
        ("order", _ADDRESS),
    )


class BlockInputs(ctypes.Structure):
    """`block_inputs`: memory of the inputs of layers in blocks."""

    _fields_ = tuple((name, _ADDRESS) for name in ("values", "scales", "sums", "floats"))


class BlockCall(ctypes.Structure):
    """`block_call`: a layer in blocks, outside of a step."""

    _fields_ = (
        ("layer", _ADDRESS),
        ("inputs", _ADDRESS),
        ("rows", _INTEGER),
        ("output", _ADDRESS),
        ("output_floats", _INTEGER),
        ("memory", BlockInputs),
        ("loops", _ADDRESS),
    )


class LinearLayer(ctypes.Structure):
    """`linear_layer`: weights of several columns, in blocks."""

    _fields_ = (
        ("weights", _ADDRESS),
        ("bias", _ADDRESS),  # [columns, padded to whole blocks], FP32
        ("size", _INTEGER),
        ("blocks", _INTEGER),
        ("block_bytes", _INTEGER),
        ("bf16", _INTEGER),
        ("blocked", _ADDRESS),
    )


class LinearCall(ctypes.Structure):
    """`linear_call`: a linear layer outside of a step."""

    _fields_ = (
        ("layer", _ADDRESS),
        ("inputs", _ADDRESS),
        ("rows", _INTEGER),
        ("row_bytes", _INTEGER),
        ("output", _ADDRESS),
        ("counters", _ADDRESS),
    )


class AttentionShape(ctypes.Structure):
    """`attention_shape`: what is the same for all rows."""

    _fields_ = (
        ("query_heads", _INTEGER),
        ("kv_heads", _INTEGER),
        ("head_size", _INTEGER),
        ("qk_norm", _INTEGER),
        ("bf16", _INTEGER),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
    )


class AttentionHead(ctypes.Structure):
    """`attention_head`: one row and one key-value head. Only tests call the kernel of attention by itself."""

    _fields_ = (
        ("head", _INTEGER),
        ("position", _INTEGER),
        ("first", _INTEGER),
        *((name, _ADDRESS) for name in ("qkv", "rotary", "keys", "values", "output")),
        *((name, _ADDRESS) for name in ("query_norm", "key_norm", "query", "scores")),
    )


class DecoderLayer(ctypes.Structure):
    """`decoder_layer`."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, LinearLayer) for name in LINEAR_LAYERS),
        ("window", _INTEGER),
    )


class Decoder(ctypes.Structure):
    """`decoder`: a model, and the memory of its steps."""

    _fields_ = (
        ("attention", AttentionShape),
        ("layer_count", _INTEGER),
        ("hidden", _INTEGER),
        ("intermediate", _INTEGER),
        ("layers", _ADDRESS),
        ("embedding", _ADDRESS),
        ("embedding_file", _ADDRESS),
        ("norm", _ADDRESS),
        ("head", LinearLayer),
        *((name, _ADDRESS) for name in ("rotary", "states", "qkv", "attended", "gates", "mlp")),
    )


class AdapterPart(ctypes.Structure):
    """`adapter_part`: weights of an adapter for some outputs of a linear layer."""

    _fields_ = (
        ("down", _ADDRESS),
        ("up", _ADDRESS),
        *((name, _INTEGER) for name in ("rank", "size", "first", "count")),
    )


class AdapterLayer(ctypes.Structure):
    """`adapter_layer`: the parts of an adapter for one linear layer."""

    _fields_ = (("parts", _ADDRESS), ("count", _INTEGER))


class AdaptedRun(ctypes.Structure):
    """`adapted_run`: consecutive rows with one adapter."""

    _fields_ = (("first", _INTEGER), ("rows", _INTEGER), ("layers", _ADDRESS))


class DecoderStep(ctypes.Structure):
    """`decoder_step`."""

    _fields_ = (
        ("model", _ADDRESS),
        ("rows", _INTEGER),
        *((name, _ADDRESS) for name in ("tokens", "positions", "slots", "keys", "values")),
        *((name, _INTEGER) for name in ("layer_bytes", "slot_bytes", "head_bytes")),
        ("output_count", _INTEGER),
        ("output_rows", _ADDRESS),
        ("run_count", _INTEGER),
        ("runs", _ADDRESS),
        ("adapted_count", _INTEGER),
        ("adapted", _ADDRESS),
        ("logits", _ADDRESS),
        ("counters", _ADDRESS),
    )


class StepScratch(ctypes.Structure):
    """`step_scratch`: memory of a thread."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("normed", "sums", "query", "scores")),
        ("score_count", _INTEGER),
        ("inputs", BlockInputs),
    )


def counter_count(layers: int, *, adapted: bool) -> int:
    """Return the number of shared loops of a step: one for the embedding, seven per layer, one for the logits; and one
    per linear layer if any row has an adapter."""
    return (7 + adapted * len(LINEAR_LAYERS)) * layers + 2
