"""The forward pass of all layers as one function in machine code; the threads that call it divide its work."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from llvmlite import ir

from dragoman_text.generation.native.code import LANES, POINTER, Code, Value, Variable
from dragoman_text.generation.native.kernels import (
    COLUMNS,
    AttentionHead,
    KernelConfig,
    attend,
    emit_norm,
    emit_product,
    gate,
    load_items,
    pad,
    store_key_value,
)
from dragoman_text.generation.native.quantized import decoder

# Products of more rows are computed in panels of this many, whose sums stay in the first-level cache.
PANEL_ROWS = 96
# Blocks of columns in one part of the last product.
_LOGIT_BLOCKS = 4


class StepArg(IntEnum):
    """Arguments of a step, in a table of 64-bit integers and addresses. Shapes are [rows, ...] unless stated."""

    ROWS = 0
    TOKENS = 1  # int64, as are positions and slots
    POSITIONS = 2
    SLOTS = 3
    EMBEDDING = 4  # [vocabulary, hidden]
    LAYERS = 5  # a table of `LayerArg` for each layer
    KEYS = 6  # [layers, slots, kv_heads, length, head_size]
    VALUES = 7
    LAYER_BYTES = 8  # strides of keys and values
    SLOT_BYTES = 9
    HEAD_BYTES = 10
    ROTARY = 11  # [positions, 2, head_size] FP32: cosines, signed sines
    STATES = 12  # [rows, padded hidden] FP32
    QKV = 13  # [rows, padded qkv_heads * head_size] FP32
    ATTENTION = 14  # [rows, query_heads * head_size]
    MLP = 15  # [rows, padded intermediate]
    LOGITS = 16  # [output rows, padded vocabulary] FP32
    COUNTERS = 17  # [counter_count(layers), 128] bytes of 0
    NORM = 18  # [hidden] FP32: the norm before the output head
    HEAD = 19
    HEAD_BIAS = 20
    GATES = 21  # [rows, padded 2 * intermediate] FP32
    OUTPUT_ROWS = 22  # [output rows] int64: rows whose logits are computed
    OUTPUT_COUNT = 23
    RUNS = 24  # [runs, 2] int64: first row and number of consecutive rows of one sequence
    RUN_COUNT = 25
    SCORE_BYTES = 26  # stride of the scores of two rows


_INTEGERS = {
    StepArg.ROWS,
    StepArg.OUTPUT_COUNT,
    StepArg.RUN_COUNT,
    StepArg.LAYER_BYTES,
    StepArg.SLOT_BYTES,
    StepArg.HEAD_BYTES,
    StepArg.SCORE_BYTES,
}


class LayerArg(IntEnum):
    """Arguments of a layer. Biases and norms are FP32; biases are padded to whole blocks, and follow their weights."""

    INPUT_NORM = 0
    QKV = 1
    QKV_BIAS = 2
    QUERY_NORM = 3
    KEY_NORM = 4
    OUT = 5
    OUT_BIAS = 6
    MLP_NORM = 7
    GATE_UP = 8
    GATE_UP_BIAS = 9
    DOWN = 10
    DOWN_BIAS = 11
    WINDOW = 12  # size of the attention window; 0: unlimited


class ThreadArg(IntEnum):
    """Scratch memory of each thread."""

    NORMED = 0  # [rows, hidden]
    SUMS = 1  # [at most PANEL_ROWS, 64] FP32
    QUERY = 2  # [run_rows, head_size] FP32
    SCORES = 3  # [run_rows, 16 + length + 16] FP32


class LinearArg(IntEnum):
    """Arguments of a single product, in a table of 64-bit integers and addresses."""

    INPUTS = 0  # [rows, inputs]
    ROWS = 1
    ROW_BYTES = 2  # of an input row
    STEPS = 3  # of the product
    WEIGHTS = 4
    BLOCKS = 5
    BLOCK_BYTES = 6
    BIAS = 7  # [columns] FP32
    OUTPUT = 8  # [rows, columns] FP32
    COUNTERS = 9


_LINEAR_ADDRESSES = {LinearArg.INPUTS, LinearArg.WEIGHTS, LinearArg.BIAS, LinearArg.OUTPUT, LinearArg.COUNTERS}


# Counters are this far apart so that threads do not write to the same cache line.
COUNTER_BYTES = 128


def counter_count(layers: int) -> int:
    """Return the number of counter pairs: one for the embedding, seven per layer, one for the logits."""
    return 7 * layers + 2


def build_module(config: KernelConfig, scaling: float) -> ir.Module:
    """Return a module with the functions `step` (table of `StepArg`, table of `ThreadArg`) and `linear` (table of
    `LinearArg`, sums [at most PANEL_ROWS, 64])."""
    module = ir.Module()
    product = emit_product(module, config, decoder(config))
    _Step(module, config, product, scaling).emit()
    _emit_linear(module, product)
    return module


# Stores 16 results, given their row and first column.
_Store = Callable[[Value, Value, Value], None]


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with the weights of one linear layer.

    source: inputs, `row_bytes` apart. steps, block_bytes: of a block of weights. sums: scratch memory of the thread.
    """

    source: Value
    row_bytes: Value
    rows: Value
    steps: Value
    weights: Value
    block_bytes: Value | int
    bias: Value
    sums: Value

    def multiply(self, code: Code, function: Any, part: Value, store: _Store) -> None:
        """Compute one block of columns, with its bias, for a panel of rows.

        Consecutive parts share a block, while it is in the cache.
        """
        panels = _panels(self.rows)
        block, first = part // panels, part % panels * PANEL_ROWS
        count = code.integer(PANEL_ROWS).minimum(self.rows - first)
        begin, columns = self.source + first * self.row_bytes, self.weights + block * self.block_bytes
        code.call_function(function, begin, self.row_bytes, columns, self.sums, count, self.steps)
        with code.loop(code.integer(0), count) as row:
            for i in range(0, COLUMNS, LANES):
                column = block * COLUMNS + i
                value = self.sums.load_vector((row * COLUMNS + i) * 4) + self.bias.load_vector(column * 4)
                store(first + row, column, value)


def _panels(rows: Value) -> Value:
    return (rows + (PANEL_ROWS - 1)) // PANEL_ROWS


def _emit_linear(module: ir.Module, product: Any) -> None:
    """Write the function `linear`: a single product, whose parts are shared by the threads that call it."""
    code = Code(module, "linear", (POINTER, POINTER))
    table, sums = code.arguments
    args = {name: (table.load_pointer if name in _LINEAR_ADDRESSES else table.load_int)(8 * name) for name in LinearArg}
    rows, blocks, output = args[LinearArg.ROWS], args[LinearArg.BLOCKS], args[LinearArg.OUTPUT]
    one = _Product(
        source=args[LinearArg.INPUTS],
        row_bytes=args[LinearArg.ROW_BYTES],
        rows=rows,
        steps=args[LinearArg.STEPS],
        weights=args[LinearArg.WEIGHTS],
        block_bytes=args[LinearArg.BLOCK_BYTES],
        bias=args[LinearArg.BIAS],
        sums=sums,
    )

    def store(row: Value, column: Value, value: Value) -> None:
        output.store(value, (row * (blocks * COLUMNS) + column) * 4)

    code.share_work(
        args[LinearArg.COUNTERS],
        _panels(rows) * blocks,
        lambda: None,
        lambda part: one.multiply(code, product, part, store),
    )
    code.finish()


def _input_sizes(config: KernelConfig) -> dict[StepArg | ThreadArg, tuple[int, int]]:
    """Return, for the inputs of products, their size and the distance between rows, in numbers."""
    attention = config.query_heads * config.head_size
    return {
        ThreadArg.NORMED: (config.hidden, config.hidden),
        StepArg.ATTENTION: (attention, attention),
        StepArg.MLP: (config.intermediate, pad(config.intermediate)),
    }


class _Step:
    """Writes the function `step`."""

    def __init__(self, module: ir.Module, config: KernelConfig, product: Any, scaling: float) -> None:
        self._config, self._scaling, self._product = config, scaling, product
        self._norm = emit_norm(module, config)
        self._code = code = Code(module, "step", (POINTER, POINTER))
        table, scratch = code.arguments
        self._args: dict[StepArg, Value] = {
            name: (table.load_int if name in _INTEGERS else table.load_pointer)(8 * name)
            for name in StepArg
            if name != StepArg.COUNTERS
        }
        self._scratch: dict[ThreadArg, Value] = {name: scratch.load_pointer(8 * name) for name in ThreadArg}
        self._rows = self._args[StepArg.ROWS]
        self._counters = Variable(code, table.load_pointer(8 * StepArg.COUNTERS))

    def emit(self) -> None:
        code, config = self._code, self._config
        self._share(self._rows, self._embed)
        with code.loop(code.integer(0), code.integer(config.layers)) as number:
            self._layer(number, self._args[StepArg.LAYERS] + number * (8 * len(LayerArg)))
        blocks = -(-pad(config.vocabulary) // (COLUMNS * _LOGIT_BLOCKS))
        self._share(self._parts(blocks, StepArg.OUTPUT_COUNT), self._logits, self._norm_outputs)
        code.finish()

    def _share(self, parts: Value, work: Callable[[Value], None], prepare: Callable[[], None] = lambda: None) -> None:
        counters = self._counters.get()
        self._code.share_work(counters, parts, prepare, work)
        self._counters.set(counters + COUNTER_BYTES)

    def _layer(self, number: Value, layer: Value) -> None:
        config, normed = self._config, ThreadArg.NORMED
        heads, hidden = pad(config.qkv_heads * config.head_size), pad(config.hidden)
        gates = pad(2 * config.intermediate)
        self._share(
            self._parts(heads // COLUMNS),
            lambda part: self._block(normed, layer, LayerArg.QKV, part, self._store(StepArg.QKV, heads)),
            lambda: self._norm_states(layer.load_pointer(8 * LayerArg.INPUT_NORM)),
        )
        self._share(self._rows * config.kv_heads, lambda part: self._store_key_value(number, layer, part))
        self._share(self._args[StepArg.RUN_COUNT] * config.kv_heads, lambda part: self._attend(number, layer, part))
        self._share(
            self._parts(hidden // COLUMNS),
            lambda part: self._block(StepArg.ATTENTION, layer, LayerArg.OUT, part, self._add_to_states),
        )
        self._share(
            self._parts(gates // COLUMNS),
            lambda part: self._block(normed, layer, LayerArg.GATE_UP, part, self._store(StepArg.GATES, gates)),
            lambda: self._norm_states(layer.load_pointer(8 * LayerArg.MLP_NORM)),
        )
        self._share(self._rows, self._gate)
        self._share(
            self._parts(hidden // COLUMNS),
            lambda part: self._block(StepArg.MLP, layer, LayerArg.DOWN, part, self._add_to_states),
        )

    def _parts(self, blocks: int, rows: StepArg = StepArg.ROWS) -> Value:
        """Return the number of parts of a product with this many blocks of columns."""
        return _panels(self._args[rows]) * blocks

    # --- parts of the work -----------------------------------------------------------------------------------

    def _embed(self, row: Value) -> None:
        config, args = self._config, self._args
        token = args[StepArg.TOKENS].load_int(row * 8)
        source = args[StepArg.EMBEDDING] + token * (config.item_bytes * config.hidden)
        target = args[StepArg.STATES] + row * (4 * pad(config.hidden))
        with self._code.loop(self._code.integer(0), self._code.integer(config.hidden), LANES) as i:
            target.store(load_items(config, source, i), i * 4)

    def _store_key_value(self, number: Value, layer: Value, part: Value) -> None:
        heads = self._config.kv_heads
        store_key_value(self._code, self._config, self._head(number, layer, part // heads, part % heads))

    def _attend(self, number: Value, layer: Value, part: Value) -> None:
        code, config = self._code, self._config
        run, head = self._args[StepArg.RUNS] + part // config.kv_heads * 16, part % config.kv_heads
        row, several = run.load_int(), code.integer(1) < run.load_int(8)

        def rows(count: int) -> None:
            heads = [self._head(number, layer, row + i, head, i) for i in range(count)]
            attend(code, config, self._scaling, heads)

        code.if_else(several, lambda: rows(config.run_rows), lambda: rows(1))

    def _head(self, number: Value, layer: Value, row: Value, head: Value, in_run: int = 0) -> AttentionHead:
        """Return a head of a row, which is number `in_run` of its run."""
        code, config, args = self._code, self._config, self._args
        position = args[StepArg.POSITIONS].load_int(row * 8)
        slot = args[StepArg.SLOTS].load_int(row * 8)
        cache = number * args[StepArg.LAYER_BYTES] + slot * args[StepArg.SLOT_BYTES] + head * args[StepArg.HEAD_BYTES]
        window = layer.load_int(8 * LayerArg.WINDOW)
        first = (code.integer(0) < window).select(position + 1 - window, code.integer(0))
        return AttentionHead(
            head=head,
            position=position,
            first=first.maximum(code.integer(0)),
            qkv=args[StepArg.QKV] + row * (4 * pad(config.qkv_heads * config.head_size)),
            rotary=args[StepArg.ROTARY] + position * (8 * config.head_size),
            keys=args[StepArg.KEYS] + cache,
            values=args[StepArg.VALUES] + cache,
            output=args[StepArg.ATTENTION] + row * (config.item_bytes * config.query_heads * config.head_size),
            norms=(layer.load_pointer(8 * LayerArg.QUERY_NORM), layer.load_pointer(8 * LayerArg.KEY_NORM)),
            query=self._scratch[ThreadArg.QUERY] + 4 * config.head_size * in_run,
            scores=self._scratch[ThreadArg.SCORES] + args[StepArg.SCORE_BYTES] * in_run + 4 * LANES,
        )

    def _gate(self, row: Value) -> None:
        config = self._config
        gates = self._args[StepArg.GATES] + row * (4 * pad(2 * config.intermediate))
        gate(self._code, config, gates, self._args[StepArg.MLP] + row * (config.item_bytes * pad(config.intermediate)))

    def _logits(self, part: Value) -> None:
        code, config, args = self._code, self._config, self._args
        blocks = code.integer(pad(config.vocabulary) // COLUMNS)
        panels = _panels(args[StepArg.OUTPUT_COUNT])
        first = part // panels * _LOGIT_BLOCKS
        store = self._store(StepArg.LOGITS, pad(config.vocabulary))
        with code.loop(first, (first + _LOGIT_BLOCKS).minimum(blocks)) as block:
            self._multiply(
                ThreadArg.NORMED,
                args[StepArg.HEAD],
                args[StepArg.HEAD_BIAS],
                block * panels + part % panels,
                store,
                StepArg.OUTPUT_COUNT,
            )

    # --- products --------------------------------------------------------------------------------------------

    def _block(self, inputs: StepArg | ThreadArg, layer: Value, name: LayerArg, part: Value, store: _Store) -> None:
        self._multiply(inputs, layer.load_pointer(8 * name), layer.load_pointer(8 * (name + 1)), part, store)

    def _multiply(
        self,
        inputs: StepArg | ThreadArg,
        weights: Value,
        bias: Value,
        part: Value,
        store: _Store,
        rows: StepArg = StepArg.ROWS,
    ) -> None:
        code, config = self._code, self._config
        size, distance = _input_sizes(config)[inputs]
        product = _Product(
            source=self._scratch[inputs] if isinstance(inputs, ThreadArg) else self._args[inputs],
            row_bytes=code.integer(config.item_bytes * distance),
            rows=self._args[rows],
            steps=code.integer(config.steps(size)),
            weights=weights,
            block_bytes=config.block_bytes(size),
            bias=bias,
            sums=self._scratch[ThreadArg.SUMS],
        )
        product.multiply(code, self._product, part, store)

    def _store(self, name: StepArg, columns: int) -> _Store:
        return lambda row, column, value: self._args[name].store(value, (row * columns + column) * 4)

    def _add_to_states(self, row: Value, column: Value, value: Value) -> None:
        states, offset = self._args[StepArg.STATES], (row * pad(self._config.hidden) + column) * 4
        states.store(states.load_vector(offset) + value, offset)

    def _norm_states(self, weight: Value) -> None:
        """Normalize all states, for this thread."""
        normed = self._scratch[ThreadArg.NORMED]
        self._code.call_function(self._norm, self._args[StepArg.STATES], weight, normed, self._rows)

    def _norm_outputs(self) -> None:
        """Normalize the states of the rows whose logits are computed."""
        code, config, args = self._code, self._config, self._args
        with code.loop(code.integer(0), args[StepArg.OUTPUT_COUNT]) as number:
            row = args[StepArg.OUTPUT_ROWS].load_int(number * 8)
            states = args[StepArg.STATES] + row * (4 * pad(config.hidden))
            normed = self._scratch[ThreadArg.NORMED] + number * (config.item_bytes * config.hidden)
            code.call_function(self._norm, states, args[StepArg.NORM], normed, code.integer(1))
