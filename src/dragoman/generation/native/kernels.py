"""What a layer of Llama and its kin is made of, as machine code: products of few rows, norms, attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from dragoman.native.code import BITS, INT, LANES, POINTER, VECTOR, Code, Value, Variable


def power(exponent: Value) -> Value:
    """e to the power of each lane, to 2 units in the last place: 2^n by the exponent's bits, the rest, within
    log(2) / 2, by its series (Cody and Waite 1980). Below -87 it is e^-87, 1.6e-38, above 88 e^88."""
    code = exponent.code
    low, high = code.vector(-87.0), code.vector(88.0)
    bounded = high.least(low.most(exponent))
    # Added to 1.5 * 2^23 a number is rounded, and its integer stands in the lowest bits.
    shifted = bounded.times_plus(code.vector(1.4426950408889634), code.vector(12582912.0))
    whole = shifted - code.vector(12582912.0)
    rest = whole.times_plus(code.vector(-0.693359375), bounded)
    rest = whole.times_plus(code.vector(2.12194440e-4), rest)
    found = code.vector(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        found = found.times_plus(rest, code.vector(1 / divisor))
    build = code.build
    bits = build.add(build.bitcast(shifted.value, BITS), ir.Constant(BITS, [127] * LANES))
    return found * Value(code, build.bitcast(build.shl(bits, ir.Constant(BITS, [23] * LANES)), VECTOR))


# Weights lie in blocks of so many columns, side by side for each step along the rows.
COLUMNS = 64
# So many rows are multiplied with a block at a time: 24 sums, 4 weights and a number are in 29 of 32 registers.
_ROWS = 6
# How far rows go along a block in turn. Up to two turns: as briefly as the core can still have the next weights coming
# while it computes; more: as far as weights stay in the nearest cache.
_NEAR, _FAR = 16, 256
# Less than any score.
_LOW = -3e38


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """What a model is made of. `halves`: weights, keys and values are BF16, sums and states are FP32 all the same.

    hidden, inner: sizes of states and of the MLP. queries, keys: numbers of heads. size: of a head. normed: queries and
    keys of each head are normed (Qwen 3).
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    size: int
    vocabulary: int
    eps: float
    normed: bool
    halves: bool

    @property
    def bytes(self) -> int:
        """Of one weight, and of what products take."""
        return 2 if self.halves else 4

    @property
    def heads(self) -> int:
        """Queries, keys and values of one row."""
        return self.queries + 2 * self.keys

    @property
    def together(self) -> int:
        """How many rows of one text attend together, so that keys and values are read once for all: as many as have
        their sums in registers."""
        return 4 if self.size <= 64 else 2 if self.size <= 160 else 1

    def steps(self, inputs: int) -> int:
        """How many steps a product of so many inputs takes: one each, or a pair in BF16, 4 bytes in any case."""
        return inputs * self.bytes // 4

    def block_bytes(self, inputs: int) -> int:
        """How many bytes lie between two blocks of a weight of so many inputs, which is packed in 64 bytes of them."""
        return -(-inputs * self.bytes // 64) * 64 * COLUMNS


def padded(columns: int) -> int:
    """So many columns as whole blocks."""
    return -(-columns // COLUMNS) * COLUMNS


def read(build: KernelConfig, where: Value, number: Value | int) -> Value:
    """16 numbers of the model's type from a number on."""
    offset = number * build.bytes
    return where.halves(offset) if build.halves else where.vector(offset)


def write(build: KernelConfig, where: Value, number: Value | int, found: Value) -> None:
    offset = number * build.bytes
    where.put_halves(found, offset) if build.halves else where.put(found, offset)


def product(module: ir.Module, build: KernelConfig) -> Any:
    """A function (inputs, bytes between their rows, block of weights, sums, rows, steps): the sums [rows, 64] become
    those of the block. The sum of a row is made in one order whatever rows are beside it."""
    tiles = [_tile(module, build, count) for count in range(1, _ROWS + 1)]
    code = Code(module, "product", (POINTER, INT, POINTER, POINTER, INT, INT))
    inputs, row_bytes, weights, sums, rows, steps = code.arguments
    with code.loop(code.integer(0), rows * COLUMNS, LANES) as place:
        sums.put(code.vector(0), place * 4)
    few = (rows < 2 * _ROWS + 1).chosen(code.integer(_NEAR), code.integer(_FAR))
    turn = (rows < _ROWS + 1).chosen(steps, few)
    with code.loop(code.integer(0), steps, turn) as step:
        count = turn.least(steps - step)
        with code.loop(code.integer(0), rows, _ROWS) as row:
            begin, block = inputs + row * row_bytes + step * 4, weights + step * (4 * COLUMNS)
            here = (begin, row_bytes, block, sums + row * (4 * COLUMNS))
            behind = code.function.append_basic_block()
            several = code.build.switch((rows - row).value, _case(code, tiles[-1], (*here, count), behind))
            for number, tile in enumerate(tiles[:-1], 1):
                several.add_case(number, _case(code, tile, (*here, count), behind))
            code.build.position_at_end(behind)
    return code.finish(called=True)


def _case(code: Code, tile: Any, values: tuple[Value, ...], behind: Any) -> Any:
    """A block that calls a function and goes on behind."""
    block = code.function.append_basic_block()
    with code.build.goto_block(block):
        code.invoke(tile, *values)
        code.build.branch(behind)
    return block


def _tile(module: ir.Module, build: KernelConfig, rows: int) -> Any:
    """A function (inputs, bytes between their rows, weights, sums, steps) that adds so many rows' products to sums."""
    code = Code(module, f"tile{rows}", (POINTER, INT, POINTER, POINTER, INT))
    inputs, row_bytes, weights, sums, steps = code.arguments
    vectors = range(COLUMNS // LANES)
    found = [[Variable(code, sums.vector(4 * (COLUMNS * row + LANES * i))) for i in vectors] for row in range(rows)]
    starts = [inputs + row_bytes * row for row in range(rows)]
    with code.loop(code.integer(0), steps) as step:
        block = weights + step * (4 * COLUMNS)
        columns = [block.vector(4 * LANES * i) for i in vectors]
        for start, kept in zip(starts, found, strict=True):
            factor = start.number(step * 4).spread()
            for weight, variable in zip(columns, kept, strict=True):
                add = factor.dotted if build.halves else factor.times_plus
                variable.set(add(weight, variable.get()))
    for row, kept in enumerate(found):
        for i, variable in enumerate(kept):
            sums.put(variable.get(), 4 * (COLUMNS * row + LANES * i))
    return code.finish()


def norm(module: ir.Module, build: KernelConfig) -> Any:
    """A function (states [rows, padded], weight, output, rows): states over their root mean square, times weight."""
    code = Code(module, "norm", (POINTER, POINTER, POINTER, INT))
    states, weight, output, rows = code.arguments
    with code.loop(code.integer(0), rows) as row:
        here, there = states + row * (4 * padded(build.hidden)), output + row * (build.bytes * build.hidden)
        factor = _over_root(code, here, build.hidden, build.eps)
        with code.loop(code.integer(0), code.integer(build.hidden), LANES) as i:
            write(build, there, i, here.vector(i * 4) * factor * weight.vector(i * 4))
    return code.finish(called=True)


def _over_root(code: Code, states: Value, size: int, eps: float) -> Value:
    """1 over the root of the mean square (Zhang and Sennrich 2019), in all lanes."""
    squares = Variable(code, code.vector(0))
    with code.loop(code.integer(0), code.integer(size), LANES) as i:
        each = states.vector(i * 4)
        squares.set(each.times_plus(each, squares.get()))
    return (code.number(1) / (squares.get().total() / code.number(size) + code.number(eps)).root()).spread()


@dataclass(frozen=True, slots=True)
class Unit:
    """One row's head of keys and the queries that go with it.

    `first`, `place`: what it sees, to its own. `given`: its queries, keys and values, FP32. `turns`: cosines and signed
    sines of its place, [2, size]. `keys`, `values`: the head's in the cache, by place. `read`: where its answer goes.
    `norms`: weights of queries and keys. `query`, `scores`: memory of the thread's own, the latter with 16 numbers more
    before and behind than there are places.
    """

    head: Value
    place: Value
    first: Value
    given: Value
    turns: Value
    keys: Value
    values: Value
    read: Value
    norms: tuple[Value, Value]
    query: Value
    scores: Value


def hold(code: Code, build: KernelConfig, unit: Unit) -> None:
    """Put the row's key and value into the cache."""
    size = build.size
    here = unit.place * size
    key = unit.given + (unit.head + build.queries) * (4 * size)
    value = unit.given + (unit.head + (build.queries + build.keys)) * (4 * size)
    _turn(code, build, key, unit.turns, unit.norms[1], lambda i, found: write(build, unit.keys, here + i, found))
    for i in range(0, size, LANES):
        write(build, unit.values, here + i, value.vector(4 * i))


def attend(code: Code, build: KernelConfig, scaling: float, units: Sequence[Unit]) -> None:
    """Read what each row's queries see from `first` to its own place. The rows are of one text, one after the other."""
    size, group = build.size, build.queries // build.keys
    with code.loop(code.integer(0), code.integer(group)) as one:
        number, factor = units[0].head * group + one, code.vector(scaling)
        for unit in units:

            def keep(i: int, found: Value, query: Value = unit.query, factor: Value = factor) -> None:
                query.put(found * factor, 4 * i)

            _turn(code, build, unit.given + number * (4 * size), unit.turns, unit.norms[0], keep)
        _score(code, build, units)
        totals = [_weigh(code, unit) for unit in units]
        _gather(code, build, units, totals, number * size)


def _turn(
    code: Code, build: KernelConfig, states: Value, turns: Value, weight: Value, put: Callable[[int, Value], None]
) -> None:
    """A head's states turned by their place (Su et al. 2021), normed before that where the model does."""
    half, parts = build.size // 2, range(0, build.size, LANES)
    vectors = {i: states.vector(4 * i) for i in parts}
    if build.normed:
        factor = _over_root(code, states, build.size, build.eps)
        vectors = {i: vectors[i] * factor * weight.vector(4 * i) for i in parts}
    for i in parts:
        other = vectors[(i + half) % build.size]
        turned = vectors[i] * turns.vector(4 * i)
        put(i, other.times_plus(turns.vector(4 * (build.size + i)), turned))


def _score(code: Code, build: KernelConfig, units: Sequence[Unit]) -> None:
    """Scores of all keys that one of the rows sees, by how far each is from the first that its own row does."""
    size, parts = build.size, range(0, build.size, LANES)
    queries = [[unit.query.vector(4 * i) for i in parts] for unit in units]
    with code.loop(units[0].first, units[-1].place + 1) as place:
        keys = [read(build, units[0].keys, place * size + i) for i in parts]
        for unit, query in zip(units, queries, strict=True):
            products = code.vector(0)
            for key, part in zip(keys, query, strict=True):
                products = part.times_plus(key, products)
            unit.scores.put(products.total(), (place - unit.first) * 4)


def _weigh(code: Code, unit: Unit) -> Value:
    """A row's scores become weights, not yet divided by their sum, which is given."""
    count = unit.place + 1 - unit.first
    unit.scores.put(code.vector(_LOW), count * 4)
    highest = Variable(code, code.vector(_LOW))
    with code.loop(code.integer(0), count, LANES) as number:
        highest.set(unit.scores.vector(number * 4).most(highest.get()))
    most, total = highest.get().highest().spread(), Variable(code, code.vector(0))
    with code.loop(code.integer(0), count, LANES) as number:
        weights = power(unit.scores.vector(number * 4) - most)
        unit.scores.put(weights, number * 4)
        total.set(total.get() + weights)
    return total.get().total()


def _gather(code: Code, build: KernelConfig, units: Sequence[Unit], totals: Sequence[Value], start: Value) -> None:
    """The values by their weights, into each row's answer from a number on.

    What all rows see is read for all at once; each alone reads what it sees before and behind, in the order of places,
    and nothing else: a value that is no number stays none times 0.
    """
    parts = range(0, build.size, LANES)
    sums = [[Variable(code, code.vector(0)) for _ in parts] for _ in units]

    def add(some: Sequence[int], begin: Value, stop: Value) -> None:
        with code.loop(begin, stop) as place:
            values = [read(build, units[0].values, place * build.size + i) for i in parts]
            for one in some:
                weight = units[one].scores.number((place - units[one].first) * 4).spread()
                for value, variable in zip(values, sums[one], strict=True):
                    variable.set(weight.times_plus(value, variable.get()))

    begin, stop = units[-1].first, units[0].place + 1
    alone = range(len(units)) if len(units) > 1 else ()
    for one in alone:
        add([one], units[one].first, begin.least(units[one].place + 1))
    add(range(len(units)), begin, stop)
    for one in alone:
        add([one], begin.most(stop), units[one].place + 1)
    for unit, kept, total in zip(units, sums, totals, strict=True):
        factor = (code.number(1) / total).spread()
        for i, variable in zip(parts, kept, strict=True):
            write(build, unit.read, start + i, variable.get() * factor)
