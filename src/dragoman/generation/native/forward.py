"""A step of all layers as one function, which any number of threads call at once and share the work of."""

from collections.abc import Callable
from enum import IntEnum

from llvmlite import ir

from dragoman.generation.native.kernels import (
    COLUMNS,
    KernelConfig,
    Unit,
    attend,
    hold,
    norm,
    padded,
    power,
    product,
    read,
    write,
)
from dragoman.native.code import LANES, POINTER, Code, Value, Variable, new_module

# A product of more rows than these is made of several, whose sums stay in the nearest cache.
PANEL = 96
# A part of the last product is so many blocks of columns.
_LOGIT_BLOCKS = 4


class StepArg(IntEnum):
    """What a step is given, in a table of 64-bit integers and addresses."""

    ROWS = 0
    TOKENS = 1  # [rows] 64-bit integers, as are places and slots
    PLACES = 2
    SLOTS = 3
    EMBEDDING = 4
    LAYERS = 5  # a table of `Layer` for each
    KEYS = 6  # [layers, slots, heads, length, size]
    VALUES = 7
    LAYER_BYTES = 8
    SLOT_BYTES = 9
    HEAD_BYTES = 10
    TURNS = 11  # [places, 2, size] FP32: cosines, signed sines
    STATES = 12  # [rows, padded hidden] FP32
    HEADS = 13  # [rows, padded heads * size] FP32
    READ = 14  # [rows, queries * size]
    INNER = 15  # [rows, padded inner]
    LOGITS = 16  # [kept, padded vocabulary] FP32
    COUNTERS = 17  # [counters(layers), 128] bytes of 0
    NORM = 18
    HEAD = 19
    HEAD_BIAS = 20
    GATES = 21  # [rows, padded 2 * inner] FP32
    WANTED = 22  # [kept] 64-bit integers: whose logits are asked for
    KEPT = 23
    RUNS = 24  # [runs, 2] 64-bit integers: the first of some rows of one text, one after the other, and how many
    RUN_COUNT = 25
    SCORE_BYTES = 26  # between the scores of two rows


_NUMBERS = {
    StepArg.ROWS,
    StepArg.KEPT,
    StepArg.RUN_COUNT,
    StepArg.LAYER_BYTES,
    StepArg.SLOT_BYTES,
    StepArg.HEAD_BYTES,
    StepArg.SCORE_BYTES,
}


class Layer(IntEnum):
    """What a layer is given; biases and weights of norms are FP32, biases padded to whole blocks of columns."""

    BEFORE = 0
    QKV = 1
    QKV_BIAS = 2
    QUERY_NORM = 3
    KEY_NORM = 4
    OUT = 5
    OUT_BIAS = 6
    BETWEEN = 7
    GATE_UP = 8
    GATE_UP_BIAS = 9
    DOWN = 10
    DOWN_BIAS = 11
    WINDOW = 12  # how far back a row sees; 0: to the beginning


class ThreadArg(IntEnum):
    """What each thread has of its own."""

    NORMED = 0  # [rows, hidden]
    SUMS = 1  # [rows, 64] FP32, of 96 rows at most
    QUERY = 2  # [together, size] FP32
    SCORES = 3  # [together, 16 + length + 16] FP32


# Counters stand so far apart that no two threads write into one line of the cache.
COUNTER_BYTES = 128


def counters(layers: int) -> int:
    """How many pairs of counters a step takes: one to embed, seven a layer, one for the logits."""
    return 7 * layers + 2


def module(build: KernelConfig, scaling: float) -> ir.Module:
    """Has the function `step` (table of `StepArg`, table of `ThreadArg`)."""
    found = new_module()
    _Step(found, build, scaling).written()
    return found


# What is done with 16 results, given their row and first column.
_Put = Callable[[Value, Value, Value], None]


def _sizes(build: KernelConfig) -> dict[StepArg | ThreadArg, tuple[int, int]]:
    """How many numbers a row of a product's inputs has, and how far rows are apart."""
    queries = build.queries * build.size
    return {
        ThreadArg.NORMED: (build.hidden, build.hidden),
        StepArg.READ: (queries, queries),
        StepArg.INNER: (build.inner, padded(build.inner)),
    }


class _Step:
    """Writes the function: `given` and `own` are the tables, `layer` the one of the layer at hand."""

    def __init__(self, made: ir.Module, build: KernelConfig, scaling: float) -> None:
        self._build, self._scaling = build, scaling
        self._product, self._norm = product(made, build), norm(made, build)
        self._code = code = Code(made, "step", (POINTER, POINTER))
        given, own = code.arguments
        self._given: dict[StepArg, Value] = {
            name: (given.integer if name in _NUMBERS else given.address)(8 * name)
            for name in StepArg
            if name != StepArg.COUNTERS
        }
        self._own: dict[ThreadArg, Value] = {name: own.address(8 * name) for name in ThreadArg}
        self._rows = self._given[StepArg.ROWS]
        self._counters = Variable(code, given.address(8 * StepArg.COUNTERS))

    def written(self) -> None:
        code, build = self._code, self._build
        self._shared(self._rows, self._embed)
        with code.loop(code.integer(0), code.integer(build.layers)) as number:
            self._layer(number, self._given[StepArg.LAYERS] + number * (8 * len(Layer)))
        self._shared(
            self._parts(-(-padded(build.vocabulary) // (COLUMNS * _LOGIT_BLOCKS)), StepArg.KEPT),
            self._logits,
            self._last,
        )
        code.finish()

    def _shared(self, parts: Value, work: Callable[[Value], None], before: Callable[[], None] = lambda: None) -> None:
        place = self._counters.get()
        self._code.share(place, parts, before, work)
        self._counters.set(place + COUNTER_BYTES)

    def _layer(self, number: Value, layer: Value) -> None:
        build = self._build
        heads, hidden = padded(build.heads * build.size), padded(build.hidden)
        gates = padded(2 * build.inner)
        self._shared(
            self._parts(heads // COLUMNS),
            lambda part: self._block(ThreadArg.NORMED, layer, Layer.QKV, part, self._keep(StepArg.HEADS, heads)),
            lambda: self._normed(layer.address(8 * Layer.BEFORE)),
        )
        self._shared(self._rows * build.keys, lambda part: self._held(number, layer, part))
        self._shared(self._given[StepArg.RUN_COUNT] * build.keys, lambda part: self._attended(number, layer, part))
        self._shared(
            self._parts(hidden // COLUMNS), lambda part: self._block(StepArg.READ, layer, Layer.OUT, part, self._add)
        )
        self._shared(
            self._parts(gates // COLUMNS),
            lambda part: self._block(ThreadArg.NORMED, layer, Layer.GATE_UP, part, self._keep(StepArg.GATES, gates)),
            lambda: self._normed(layer.address(8 * Layer.BETWEEN)),
        )
        self._shared(self._rows, self._gated)
        self._shared(
            self._parts(hidden // COLUMNS), lambda part: self._block(StepArg.INNER, layer, Layer.DOWN, part, self._add)
        )

    def _parts(self, blocks: int, rows: StepArg = StepArg.ROWS) -> Value:
        """How many parts a product of so many blocks of columns has."""
        return self._panels(rows) * blocks

    def _panels(self, rows: StepArg) -> Value:
        return (self._given[rows] + (PANEL - 1)) // PANEL

    # --- parts of the work -----------------------------------------------------------------------------------

    def _embed(self, row: Value) -> None:
        build, given = self._build, self._given
        token = given[StepArg.TOKENS].integer(row * 8)
        source = given[StepArg.EMBEDDING] + token * (build.bytes * build.hidden)
        target = given[StepArg.STATES] + row * (4 * padded(build.hidden))
        with self._code.loop(self._code.integer(0), self._code.integer(build.hidden), LANES) as i:
            target.put(read(build, source, i), i * 4)

    def _held(self, number: Value, layer: Value, part: Value) -> None:
        keys = self._build.keys
        hold(self._code, self._build, self._unit(number, layer, part // keys, part % keys))

    def _attended(self, number: Value, layer: Value, part: Value) -> None:
        code, build = self._code, self._build
        run, head = self._given[StepArg.RUNS] + part // build.keys * 16, part % build.keys
        row, several = run.integer(), code.integer(1) < run.integer(8)

        def rows(count: int) -> None:
            attend(code, build, self._scaling, [self._unit(number, layer, row + i, head, i) for i in range(count)])

        code.either(several, lambda: rows(build.together), lambda: rows(1))

    def _unit(self, number: Value, layer: Value, row: Value, head: Value, beside: int = 0) -> Unit:
        """A row's head, one of some that are beside each other."""
        code, build, given = self._code, self._build, self._given
        place = given[StepArg.PLACES].integer(row * 8)
        held = number * given[StepArg.LAYER_BYTES] + given[StepArg.SLOTS].integer(row * 8) * given[StepArg.SLOT_BYTES]
        held = held + head * given[StepArg.HEAD_BYTES]
        window = layer.integer(8 * Layer.WINDOW)
        behind = place + 1 - window
        far = (code.integer(0) < window).chosen(behind, code.integer(0))
        return Unit(
            head=head,
            place=place,
            first=far.most(code.integer(0)),
            given=given[StepArg.HEADS] + row * (4 * padded(build.heads * build.size)),
            turns=given[StepArg.TURNS] + place * (8 * build.size),
            keys=given[StepArg.KEYS] + held,
            values=given[StepArg.VALUES] + held,
            read=given[StepArg.READ] + row * (build.bytes * build.queries * build.size),
            norms=(layer.address(8 * Layer.QUERY_NORM), layer.address(8 * Layer.KEY_NORM)),
            query=self._own[ThreadArg.QUERY] + 4 * build.size * beside,
            scores=self._own[ThreadArg.SCORES] + given[StepArg.SCORE_BYTES] * beside + 4 * LANES,
        )

    def _gated(self, row: Value) -> None:
        """A row of the MLP: silu(gate) * up."""
        code, build = self._code, self._build
        gates = self._given[StepArg.GATES] + row * (4 * padded(2 * build.inner))
        inner = self._given[StepArg.INNER] + row * (build.bytes * padded(build.inner))
        with code.loop(code.integer(0), code.integer(build.inner), LANES) as i:
            gate, up = gates.vector(i * 4), gates.vector((i + build.inner) * 4)
            write(build, inner, i, gate / (power(code.vector(0) - gate) + code.vector(1)) * up)

    def _logits(self, part: Value) -> None:
        code, build = self._code, self._build
        blocks, panels = code.integer(padded(build.vocabulary) // COLUMNS), self._panels(StepArg.KEPT)
        first = part // panels * _LOGIT_BLOCKS
        stop = first + _LOGIT_BLOCKS
        keep = self._keep(StepArg.LOGITS, padded(build.vocabulary))
        with code.loop(first, stop.least(blocks)) as block:
            here = block * panels + part % panels
            self._multiply(
                ThreadArg.NORMED, self._given[StepArg.HEAD], self._given[StepArg.HEAD_BIAS], here, keep, StepArg.KEPT
            )

    # --- products --------------------------------------------------------------------------------------------

    def _block(self, inputs: StepArg | ThreadArg, layer: Value, name: Layer, part: Value, put: _Put) -> None:
        self._multiply(inputs, layer.address(8 * name), layer.address(8 * (name + 1)), part, put)

    def _multiply(
        self,
        inputs: StepArg | ThreadArg,
        weights: Value,
        bias: Value,
        part: Value,
        put: _Put,
        rows: StepArg = StepArg.ROWS,
    ) -> None:
        """One block of columns of a product with its bias, for a panel of rows; `put` gets row, column and 16 results.

        Parts that share a block come one after the other, while it is in a cache.
        """
        code, build = self._code, self._build
        source = self._own[inputs] if isinstance(inputs, ThreadArg) else self._given[inputs]
        size, apart = _sizes(build)[inputs]
        panels, sums = self._panels(rows), self._own[ThreadArg.SUMS]
        block, first = part // panels, part % panels * PANEL
        count = code.integer(PANEL).least(self._given[rows] - first)
        begin, steps = source + first * (build.bytes * apart), code.integer(build.steps(size))
        apart_bytes = code.integer(build.bytes * apart)
        code.invoke(self._product, begin, apart_bytes, weights + block * build.block_bytes(size), sums, count, steps)
        with code.loop(code.integer(0), count) as row:
            for i in range(0, COLUMNS, LANES):
                column = block * COLUMNS + i
                put(first + row, column, sums.vector((row * COLUMNS + i) * 4) + bias.vector(column * 4))

    def _keep(self, name: StepArg, columns: int) -> _Put:
        return lambda row, column, found: self._given[name].put(found, (row * columns + column) * 4)

    def _add(self, row: Value, column: Value, found: Value) -> None:
        states, place = self._given[StepArg.STATES], (row * padded(self._build.hidden) + column) * 4
        states.put(states.vector(place) + found, place)

    def _normed(self, weight: Value) -> None:
        """All states normed, for this thread."""
        self._code.invoke(self._norm, self._given[StepArg.STATES], weight, self._own[ThreadArg.NORMED], self._rows)

    def _last(self) -> None:
        """The states whose logits are wanted, normed."""
        code, build, given = self._code, self._build, self._given
        with code.loop(code.integer(0), given[StepArg.KEPT]) as number:
            states = given[StepArg.STATES] + given[StepArg.WANTED].integer(number * 8) * (4 * padded(build.hidden))
            normed = self._own[ThreadArg.NORMED] + number * (build.bytes * build.hidden)
            code.invoke(self._norm, states, given[StepArg.NORM], normed, code.integer(1))
