"""What a layer of Llama and its kin is made of, as machine code: products of few rows, norms, attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from dragoman.generation.native.code import INT, LANES, POINTER, Code, Value, Variable

# Weights lie in blocks of so many columns, side by side for each step along the rows.
COLUMNS = 64
# So many rows are multiplied with a block at a time: 24 sums, 4 weights and a number are in 29 of 32 registers.
_ROWS = 6
# How far rows go along a block in turn. Up to two turns: as briefly as the core can still have the next weights coming
# while it computes; more: as far as weights stay in the nearest cache.
_NEAR, _FAR = 16, 256


@dataclass(frozen=True, slots=True)
class Build:
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

    def steps(self, inputs: int) -> int:
        """How many steps a product of so many inputs takes: one each, or a pair in BF16, 4 bytes in any case."""
        return inputs * self.bytes // 4

    def apart(self, inputs: int) -> int:
        """How many bytes lie between two blocks of a weight of so many inputs, which is packed in 64 bytes of them."""
        return -(-inputs * self.bytes // 64) * 64 * COLUMNS


def padded(columns: int) -> int:
    """So many columns as whole blocks."""
    return -(-columns // COLUMNS) * COLUMNS


def read(build: Build, where: Value, number: Value | int) -> Value:
    """16 numbers of the model's type from a number on."""
    offset = number * build.bytes
    return where.halves(offset) if build.halves else where.vector(offset)


def write(build: Build, where: Value, number: Value | int, found: Value) -> None:
    offset = number * build.bytes
    where.put_halves(found, offset) if build.halves else where.put(found, offset)


def product(module: ir.Module, build: Build) -> Any:
    """A function (inputs, bytes between their rows, block of weights, sums, rows, steps): the sums [rows, 64] become
    those of the block. The sum of a row is made in one order whatever rows are beside it."""
    tiles = [_tile(module, build, count) for count in range(1, _ROWS + 1)]
    code = Code(module, "product", (POINTER, INT, POINTER, POINTER, INT, INT))
    inputs, apart, weights, sums, rows, steps = code.arguments
    with code.loop(code.integer(0), rows * COLUMNS, LANES) as place:
        sums.put(code.vector(0), place * 4)
    few = (rows < 2 * _ROWS + 1).chosen(code.integer(_NEAR), code.integer(_FAR))
    turn = (rows < _ROWS + 1).chosen(steps, few)
    with code.loop(code.integer(0), steps, turn) as step:
        left = steps - step
        count = (left < turn).chosen(left, turn)
        with code.loop(code.integer(0), rows, _ROWS) as row:
            here = (inputs + row * apart + step * 4, apart, weights + step * (4 * COLUMNS), sums + row * (4 * COLUMNS))
            behind = code.function.append_basic_block()
            several = code.build.switch((rows - row).value, _case(code, tiles[-1], (*here, count), behind))
            for number, tile in enumerate(tiles[:-1], 1):
                several.add_case(number, _case(code, tile, (*here, count), behind))
            code.build.position_at_end(behind)
    return code.finish(apart=True)


def _case(code: Code, tile: Any, values: tuple[Value, ...], behind: Any) -> Any:
    """A block that calls a function and goes on behind."""
    block = code.function.append_basic_block()
    with code.build.goto_block(block):
        code.invoke(tile, *values)
        code.build.branch(behind)
    return block


def _tile(module: ir.Module, build: Build, rows: int) -> Any:
    """A function (inputs, bytes between their rows, weights, sums, steps) that adds so many rows' products to sums."""
    code = Code(module, f"tile{rows}", (POINTER, INT, POINTER, POINTER, INT))
    inputs, apart, weights, sums, steps = code.arguments
    vectors = range(COLUMNS // LANES)
    found = [[Variable(code, sums.vector(4 * (COLUMNS * row + LANES * i))) for i in vectors] for row in range(rows)]
    starts = [inputs + apart * row for row in range(rows)]
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


def norm(module: ir.Module, build: Build) -> Any:
    """A function (states [rows, padded], weight, output, rows): states over their root mean square, times weight."""
    code = Code(module, "norm", (POINTER, POINTER, POINTER, INT))
    states, weight, output, rows = code.arguments
    with code.loop(code.integer(0), rows) as row:
        here, there = states + row * (4 * padded(build.hidden)), output + row * (build.bytes * build.hidden)
        factor = _over_root(code, here, build.hidden, build.eps)
        with code.loop(code.integer(0), code.integer(build.hidden), LANES) as i:
            write(build, there, i, here.vector(i * 4) * factor * weight.vector(i * 4))
    return code.finish(apart=True)


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
    `norms`: weights of queries and keys. `query`, `scores`: memory of the thread's own.
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


def hold(code: Code, build: Build, unit: Unit) -> None:
    """Put the row's key and value into the cache."""
    size = build.size
    here = unit.place * size
    key = unit.given + (unit.head + build.queries) * (4 * size)
    value = unit.given + (unit.head + (build.queries + build.keys)) * (4 * size)
    _turn(code, build, key, unit.turns, unit.norms[1], lambda i, found: write(build, unit.keys, here + i, found))
    for i in range(0, size, LANES):
        write(build, unit.values, here + i, value.vector(4 * i))


def attend(code: Code, build: Build, scaling: float, unit: Unit) -> None:
    """Read what the row's queries see from `first` to its own place."""
    size, group = build.size, build.queries // build.keys
    with code.loop(code.integer(0), code.integer(group)) as one:
        number = unit.head * group + one
        factor = code.vector(scaling)

        def keep(i: int, found: Value, factor: Value = factor) -> None:
            unit.query.put(found * factor, 4 * i)

        _turn(code, build, unit.given + number * (4 * size), unit.turns, unit.norms[0], keep)
        over = _weigh(code, build, unit)
        _gather(code, build, unit, over, number * size)


def _turn(
    code: Code, build: Build, states: Value, turns: Value, weight: Value, put: Callable[[int, Value], None]
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


def _weigh(code: Code, build: Build, unit: Unit) -> Value:
    """Scores of all keys that are seen become weights, not yet divided by their sum, which is given."""
    size, parts = build.size, range(0, build.size, LANES)
    query = [unit.query.vector(4 * i) for i in parts]
    most = Variable(code, code.number(-3e38))
    with code.loop(unit.first, unit.place + 1) as place:
        products = code.vector(0)
        for i, part in zip(parts, query, strict=True):
            products = part.times_plus(read(build, unit.keys, place * size + i), products)
        score = products.total()
        unit.scores.put(score, (place - unit.first) * 4)
        most.set((most.get() < score).chosen(score, most.get()))
    count = unit.place + 1 - unit.first
    unit.scores.put(code.vector(-3e38), count * 4)
    highest, total = most.get().spread(), Variable(code, code.vector(0))
    with code.loop(code.integer(0), count, LANES) as number:
        weights = (unit.scores.vector(number * 4) - highest).power()
        unit.scores.put(weights, number * 4)
        total.set(total.get() + weights)
    return total.get().total()


def _gather(code: Code, build: Build, unit: Unit, total: Value, start: Value) -> None:
    """The values by their weights, into the row's answer from a number on."""
    parts = range(0, build.size, LANES)
    sums = [Variable(code, code.vector(0)) for _ in parts]
    with code.loop(unit.first, unit.place + 1) as place:
        weight = unit.scores.number((place - unit.first) * 4).spread()
        for i, kept in zip(parts, sums, strict=True):
            kept.set(weight.times_plus(read(build, unit.values, place * build.size + i), kept.get()))
    factor = (code.number(1) / total).spread()
    for i, kept in zip(parts, sums, strict=True):
        write(build, unit.read, start + i, kept.get() * factor)
