"""Kernels of a decoder layer in machine code, each followed by the same computation in PyTorch.

The `*_reference` functions define what the kernels compute; tests compare both. Sums are FP32 in a fixed order, so
the result of a row does not depend on the other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

from dragoman_text.generation.native.code import INT32_VECTOR, INT64, LANES, POINTER, VECTOR, Code, Value, Variable

# Weights are stored in blocks of this many columns (outputs), adjacent for each step along the inputs.
COLUMNS = 64
# Inputs of a column that have one scale, if weights are quantized.
GROUP = 32
# Instruction set extensions that the code needs at least, by LLVM's names.
AVX2 = frozenset(("avx2", "fma"))
# Steps along a block per turn of the tiles. For up to two tiles: few, so that the core prefetches weights while it
# computes. For more: as many as keep the weights in the first-level cache.
_SHORT_TURN, _LONG_TURN = 16, 256
# Steps by which a tile that reads one part of the columns prefetches its weights.
_PREFETCHED_STEPS = 24
# Less than any attention score.
_LOWEST = -3e38


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Dimensions of a model. bf16: weights, keys and values are BF16 (else FP32); sums and states are always FP32.

    qk_norm: the queries and keys of each head are normalized (Qwen 3). eps: of the norms. bits: of a quantized weight,
    8 or 4; 0 for the model's dtype. avx512: use its instructions, for BF16 also those for BF16; otherwise AVX2.
    """

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    eps: float
    qk_norm: bool
    bf16: bool
    bits: int = 0
    avx512: bool = True

    @property
    def instructions(self) -> frozenset[str]:
        """Instruction set extensions to compile for; none: all of this CPU."""
        return frozenset() if self.avx512 else AVX2

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight, and of an input of a product."""
        return 2 if self.bf16 else 4

    @property
    def qkv_heads(self) -> int:
        """Number of heads of queries, keys and values together."""
        return self.query_heads + 2 * self.kv_heads

    @property
    def run_rows(self) -> int:
        """Rows of one sequence that attend together, reading keys and values once: as many as fit into registers."""
        return 4 if self.head_size <= 64 else 2 if self.head_size <= 160 else 1

    @property
    def pair(self) -> int:
        """Inputs of a step of a product: one, or two that an instruction for BF16 multiplies together."""
        return 2 if self.bf16 and self.avx512 else 1

    @property
    def step_bytes(self) -> int:
        """Bytes of the inputs of a step."""
        return self.pair * self.item_bytes

    @property
    def parts(self) -> int:
        """Parts of the columns of a block that are stored one after the other, for tiles that read only one of them."""
        return 1 if self.avx512 or self.bits else COLUMNS // LANES

    @property
    def tile_rows(self) -> int:
        """Maximum number of rows of a tile: as many as fit into registers beside those that decode weights."""
        needs_more = (self.bits == 8 and self.pair > 1) or (self.bits == 4 and not self.avx512)
        return 5 if needs_more else 6

    def tile_vectors(self, rows: int) -> int:
        """Return the vectors of 16 columns that a tile computes at once: 4, 2 or 1.

        With AVX-512 24 sums, 4 weights and an input are in 29 of 32 registers. With AVX2 a vector takes two of 16
        registers; converted weights need some, others are read from memory.
        """
        sums = 24 if self.avx512 else 4 if self.bf16 or self.bits else 6
        return next((count for count in (4, 2) if rows * count <= sums), 1)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of quantized weights of a block: scales in BF16, then integers."""
        return COLUMNS * 2 + COLUMNS * GROUP * self.bits // 8

    def steps(self, inputs: int) -> int:
        """Return the number of steps of a product."""
        return inputs // self.pair

    def block_bytes(self, inputs: int) -> int:
        """Return the bytes of a block of weights."""
        return inputs // GROUP * self.group_bytes if self.bits else inputs * self.item_bytes * COLUMNS


def pad(columns: int) -> int:
    """Round up to whole blocks of columns."""
    return -(-columns // COLUMNS) * COLUMNS


def load_items(config: KernelConfig, address: Value, index: Value | int) -> Value:
    """Load 16 numbers of the model's dtype, as FP32."""
    offset = index * config.item_bytes
    return address.load_bf16(offset) if config.bf16 else address.load_vector(offset)


def store_items(config: KernelConfig, address: Value, index: Value | int, value: Value) -> None:
    store = (address.store_bf16 if config.avx512 else address.store_bf16_bits) if config.bf16 else address.store
    store(value, index * config.item_bytes)


# --- exponential function --------------------------------------------------------------------------------------


def exp(exponent: Value) -> Value:
    """e to the power of each lane, within 2 units in the last place, clamped to e^-87 and e^88.

    The exponent is split into n * log(2) and a rest within log(2) / 2 (Cody and Waite 1980): 2^n is built from its
    bits, the rest is evaluated by its Taylor series.
    """
    code = exponent.code
    low, high = code.vector(-87.0), code.vector(88.0)
    clamped = high.minimum(low.maximum(exponent))
    # Adding 1.5 * 2^23 rounds to an integer, which is in the lowest bits.
    shifted = clamped.fma(code.vector(1.4426950408889634), code.vector(12582912.0))
    n = shifted - code.vector(12582912.0)
    rest = n.fma(code.vector(-0.693359375), clamped)
    rest = n.fma(code.vector(2.12194440e-4), rest)
    result = code.vector(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        result = result.fma(rest, code.vector(1 / divisor))
    return result * ((shifted.bitcast(INT32_VECTOR) + 127) << 23).bitcast(VECTOR)


# --- products --------------------------------------------------------------------------------------------------


# Decodes 64 bytes of quantized weights to vectors of the model's dtype, in the order of `emit_product`'s blocks.
Decode = Callable[[Code, Value], list[Value]]
CHUNK = 64


def emit_product(module: ir.Module, config: KernelConfig, decode: Decode | None = None) -> Any:
    """Write a function (inputs, bytes between their rows, block of weights, sums, rows, steps).

    It sets the sums [rows, 64] to the product of the inputs with the block. Each tile decodes quantized weights in its
    registers, which is as fast as decoding them once into memory for all tiles.
    """
    tile_rows = config.tile_rows
    tiles = [_emit_tile(module, config, count, decode) for count in range(1, tile_rows + 1)]
    code = Code(module, "product", (POINTER, INT64, POINTER, POINTER, INT64, INT64))
    inputs, row_bytes, weights, sums, rows, steps = code.arguments
    with code.loop(code.integer(0), rows * COLUMNS, LANES) as i:
        sums.store(code.vector(0), i * 4)
    several_tiles = (rows < 2 * tile_rows + 1).select(code.integer(_SHORT_TURN), code.integer(_LONG_TURN))
    turn, step_bytes = (rows < tile_rows + 1).select(steps, several_tiles), config.step_bytes * COLUMNS // config.parts
    if config.bits:
        turn, step_bytes = code.integer(config.steps(GROUP)), config.group_bytes // config.steps(GROUP)
    with code.loop(code.integer(0), steps, turn) as step:
        count, block = turn.minimum(steps - step), weights + step * step_bytes
        with code.loop(code.integer(0), rows, tile_rows) as row:
            begin = inputs + row * row_bytes + step * config.step_bytes
            arguments = (begin, row_bytes, block, sums + row * (4 * COLUMNS), count, steps * step_bytes)
            end = code.function.append_basic_block()
            switch = code.build.switch((rows - row).value, _call_block(code, tiles[-1], arguments, end))
            for number, tile in enumerate(tiles[:-1], 1):
                switch.add_case(number, _call_block(code, tile, arguments, end))
            code.build.position_at_end(end)
    return code.finish(noinline=True)


def _call_block(code: Code, tile: Any, arguments: Sequence[Value], end: Any) -> Any:
    """Return a basic block that calls a function and continues at `end`."""
    block = code.function.append_basic_block()
    with code.build.goto_block(block):
        code.call_function(tile, *arguments)
        code.build.branch(end)
    return block


def _emit_tile(module: ir.Module, config: KernelConfig, rows: int, decode: Decode | None) -> Any:
    """Write a function (inputs, bytes between their rows, weights, sums, steps) that adds the products of `rows` rows
    to their sums. Quantized weights are those of one group, after its scales."""
    code = Code(module, f"tile{rows}", (POINTER, INT64, POINTER, POINTER, INT64, INT64))
    vectors = config.tile_vectors(rows)
    for first in range(0, COLUMNS // LANES, vectors):
        _emit_tile_columns(code, config, rows, range(first, first + vectors), decode)
    return code.finish()


def _emit_tile_columns(
    code: Code, config: KernelConfig, rows: int, wanted: Sequence[int], decode: Decode | None
) -> None:
    """Write the part of a tile that computes the wanted vectors of the block's columns."""
    inputs, row_bytes, weights, sums, steps, part_bytes = code.arguments
    vectors = COLUMNS // LANES
    targets = [[sums + 4 * (COLUMNS * row + LANES * i) for i in wanted] for row in range(rows)]
    first = [[target.load_vector() if decode is None else code.vector(0) for target in each] for each in targets]
    accumulators = [[Variable(code, value) for value in each] for each in first]
    starts = [inputs + row_bytes * row for row in range(rows)]
    in_chunk = 8 * CHUNK // (config.bits * LANES * config.pair) if config.bits else vectors
    turn = in_chunk // vectors or 1
    with code.loop(code.integer(0), steps, turn) as step:
        if decode is None:
            columns = _load_weights(config, weights, part_bytes, step, wanted)
        else:
            chunks = weights + 2 * COLUMNS + step * (vectors * CHUNK // in_chunk)
            decoded = [each for i in range(turn * vectors // in_chunk) for each in decode(code, chunks + i * CHUNK)]
            columns = [decoded[i * vectors + number] for i in range(turn) for number in wanted]
        for i in range(turn):
            for start, variables in zip(starts, accumulators, strict=True):
                factor = _load_input(config, start, step + i)
                multiply_add = factor.dot_bf16 if config.pair > 1 else factor.fma
                for weight, variable in zip(columns[i * len(wanted) :], variables, strict=False):
                    variable.set(multiply_add(weight, variable.get()))
    for variables, each in zip(accumulators, targets, strict=True):
        for number, variable, target in zip(wanted, variables, each, strict=True):
            value, scales = variable.get(), 2 * LANES * number
            target.store(value if decode is None else value.fma(weights.load_bf16(scales), target.load_vector()))


def _load_weights(
    config: KernelConfig, weights: Value, part_bytes: Value, step: Value, wanted: Sequence[int]
) -> list[Value]:
    """Load the weights of a step for the wanted vectors of columns."""
    size, columns = COLUMNS // LANES // config.parts, COLUMNS // config.parts
    vectors = []
    for number in wanted:
        part, index = weights + part_bytes * (number // size), step * columns + number % size * LANES
        if len(wanted) == 1:  # the core prefetches several parts at once fast enough, but not a single one
            part.prefetch((step + _PREFETCHED_STEPS) * (columns * config.step_bytes))
        vectors.append(part.load_vector(index * 4) if config.pair > 1 else load_items(config, part, index))
    return vectors


def _load_input(config: KernelConfig, inputs: Value, step: Value) -> Value:
    """Load the input of a step, in all lanes."""
    if config.bf16 and config.pair == 1:
        return inputs.broadcast_bf16(step * 2)
    return inputs.load_float(step * 4).broadcast()


# --- root mean square norm (Zhang and Sennrich 2019) -------------------------------------------------------------


def emit_norm(module: ir.Module, config: KernelConfig) -> Any:
    """Write a function (states [rows, padded hidden] FP32, weight, output [rows, hidden], rows)."""
    code = Code(module, "norm", (POINTER, POINTER, POINTER, INT64))
    states, weight, output, rows = code.arguments
    with code.loop(code.integer(0), rows) as row:
        source = states + row * (4 * pad(config.hidden))
        target = output + row * (config.item_bytes * config.hidden)
        scale = _reciprocal_rms(code, source, config.hidden, config.eps)
        with code.loop(code.integer(0), code.integer(config.hidden), LANES) as i:
            store_items(config, target, i, source.load_vector(i * 4) * scale * weight.load_vector(i * 4))
    return code.finish(noinline=True)


def _reciprocal_rms(code: Code, states: Value, size: int, eps: float) -> Value:
    """1 / sqrt(mean of squares + eps), in all lanes."""
    squares = Variable(code, code.vector(0))
    with code.loop(code.integer(0), code.integer(size), LANES) as i:
        each = states.load_vector(i * 4)
        squares.set(each.fma(each, squares.get()))
    mean = squares.get().lane_sum() / code.number(size)
    return (code.number(1) / (mean + code.number(eps)).sqrt()).broadcast()


# --- gated MLP ---------------------------------------------------------------------------------------------------


def gate(code: Code, config: KernelConfig, gates: Value, output: Value) -> None:
    """silu(gate) * up for one row; `gates` has both halves, FP32."""
    with code.loop(code.integer(0), code.integer(config.intermediate), LANES) as i:
        gated, up = gates.load_vector(i * 4), gates.load_vector((i + config.intermediate) * 4)
        store_items(config, output, i, gated / (exp(code.vector(0) - gated) + code.vector(1)) * up)


# --- attention ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionHead:
    """One row (token) and one key-value head, with the query heads that share it.

    position: of the token in its sequence; it attends to positions from `first` to its own.
    qkv: its queries, keys and values [qkv_heads, head_size], FP32.
    rotary: cosines and signed sines of its position, [2, head_size].
    keys, values: those of the head in the cache, [length, head_size].
    output: [query_heads, head_size].
    norms: weights of the query norm and the key norm.
    query, scores: scratch memory of the thread; `scores` has 16 numbers of padding at both ends.
    """

    head: Value
    position: Value
    first: Value
    qkv: Value
    rotary: Value
    keys: Value
    values: Value
    output: Value
    norms: tuple[Value, Value]
    query: Value
    scores: Value


def store_key_value(code: Code, config: KernelConfig, at: AttentionHead) -> None:
    """Write the row's key, rotated, and value into the cache."""
    size = config.head_size
    index = at.position * size
    key = at.qkv + (at.head + config.query_heads) * (4 * size)
    value = at.qkv + (at.head + (config.query_heads + config.kv_heads)) * (4 * size)
    _rotate(
        code, config, key, at.rotary, at.norms[1], lambda i, vector: store_items(config, at.keys, index + i, vector)
    )
    for i in range(0, size, LANES):
        store_items(config, at.values, index + i, value.load_vector(4 * i))


def attend(code: Code, config: KernelConfig, scaling: float, rows: Sequence[AttentionHead]) -> None:
    """Compute the attention of one head for consecutive rows of one sequence."""
    size, group = config.head_size, config.query_heads // config.kv_heads
    with code.loop(code.integer(0), code.integer(group)) as number:
        head, factor = rows[0].head * group + number, code.vector(scaling)
        for at in rows:

            def keep(i: int, vector: Value, query: Value = at.query, factor: Value = factor) -> None:
                query.store(vector * factor, 4 * i)

            _rotate(code, config, at.qkv + head * (4 * size), at.rotary, at.norms[0], keep)
        _score(code, config, rows)
        sums = [_softmax(code, at) for at in rows]
        _weigh_values(code, config, rows, sums, head * size)


def _rotate(
    code: Code, config: KernelConfig, states: Value, rotary: Value, weight: Value, put: Callable[[int, Value], None]
) -> None:
    """Rotary embedding of a head (Su et al. 2021), normalized before if the model does so."""
    half, parts = config.head_size // 2, range(0, config.head_size, LANES)
    vectors = {i: states.load_vector(4 * i) for i in parts}
    if config.qk_norm:
        scale = _reciprocal_rms(code, states, config.head_size, config.eps)
        vectors = {i: vectors[i] * scale * weight.load_vector(4 * i) for i in parts}
    for i in parts:
        other = vectors[(i + half) % config.head_size]
        cosine, sine = rotary.load_vector(4 * i), rotary.load_vector(4 * (config.head_size + i))
        put(i, other.fma(sine, vectors[i] * cosine))


def _score(code: Code, config: KernelConfig, rows: Sequence[AttentionHead]) -> None:
    """Scores of all keys that any of the rows sees; each row stores them from its own `first` on."""
    size, parts = config.head_size, range(0, config.head_size, LANES)
    queries = [[at.query.load_vector(4 * i) for i in parts] for at in rows]
    with code.loop(rows[0].first, rows[-1].position + 1) as position:
        keys = [load_items(config, rows[0].keys, position * size + i) for i in parts]
        for at, query in zip(rows, queries, strict=True):
            products = code.vector(0)
            for key, part in zip(keys, query, strict=True):
                products = part.fma(key, products)
            at.scores.store(products.lane_sum(), (position - at.first) * 4)


def _softmax(code: Code, at: AttentionHead) -> Value:
    """Replace a row's scores by their exponentials and return the sum of these."""
    count = at.position + 1 - at.first
    at.scores.store(code.vector(_LOWEST), count * 4)
    highest = Variable(code, code.vector(_LOWEST))
    with code.loop(code.integer(0), count, LANES) as i:
        highest.set(at.scores.load_vector(i * 4).maximum(highest.get()))
    maximum, total = highest.get().lane_max().broadcast(), Variable(code, code.vector(0))
    with code.loop(code.integer(0), count, LANES) as i:
        weights = exp(at.scores.load_vector(i * 4) - maximum)
        at.scores.store(weights, i * 4)
        total.set(total.get() + weights)
    return total.get().lane_sum()


def _weigh_values(
    code: Code, config: KernelConfig, rows: Sequence[AttentionHead], totals: Sequence[Value], start: Value
) -> None:
    """Write the weighted sums of values to each row's output, from index `start` on.

    Positions that all rows see are read once for all. The others are read for single rows, in the order of positions,
    and only if the row sees them: NaN times a weight of 0 would be NaN.
    """
    parts = range(0, config.head_size, LANES)
    sums = [[Variable(code, code.vector(0)) for _ in parts] for _ in rows]

    def add(numbers: Sequence[int], begin: Value, stop: Value) -> None:
        with code.loop(begin, stop) as position:
            values = [load_items(config, rows[0].values, position * config.head_size + i) for i in parts]
            for number in numbers:
                at = rows[number]
                weight = at.scores.load_float((position - at.first) * 4).broadcast()
                for value, variable in zip(values, sums[number], strict=True):
                    variable.set(weight.fma(value, variable.get()))

    begin, stop = rows[-1].first, rows[0].position + 1
    single = range(len(rows)) if len(rows) > 1 else ()
    for number in single:
        add([number], rows[number].first, begin.minimum(rows[number].position + 1))
    add(range(len(rows)), begin, stop)
    for number in single:
        add([number], begin.maximum(stop), rows[number].position + 1)
    for at, variables, total in zip(rows, sums, totals, strict=True):
        factor = (code.number(1) / total).broadcast()
        for i, variable in zip(parts, variables, strict=True):
            store_items(config, at.output, start + i, variable.get() * factor)
