"""Machine code written as expressions: numbers, vectors of 16, integers in 8 lanes, loops, work that threads share."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir


def new_module() -> ir.Module:
    """Where functions are written into."""
    return ir.Module()


class Compiled:
    """A module as code of this machine: `function` gives one of its functions, callable without Python's lock."""

    def __init__(self, module: ir.Module) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_default_triple()
        features = binding.get_host_cpu_features().flatten()
        machine = target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=3)
        module.triple = machine.triple
        parsed = binding.parse_assembly(str(module))
        options = binding.create_pipeline_tuning_options(speed_level=3)
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        self._engine = binding.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def function(self, name: str, arguments: int, *, gives: bool = False) -> Callable[..., Any]:
        """A function of so many integers or addresses, which gives an integer or nothing; the code stays as long as
        there is one who may call it."""
        kinds = [ctypes.c_int64] * arguments
        found = ctypes.CFUNCTYPE(ctypes.c_int64 if gives else None, *kinds)(self._engine.get_function_address(name))
        found.code = self._engine  # type: ignore[attr-defined]
        return found


def instructions() -> set[str]:
    """Which extensions of its instructions this machine has, by LLVM's names."""
    return {name for name, there in binding.get_host_cpu_features().items() if there}


LANES = 16
INT, WORD, BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
FLOAT, POINTER, NOTHING = ir.FloatType(), ir.PointerType(), ir.VoidType()


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types to check
    """LLVM's `bfloat`, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


VECTOR = ir.VectorType(FLOAT, LANES)
BITS = ir.VectorType(WORD, LANES)  # of a vector
HALVES, PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)
EIGHT = ir.VectorType(INT, 8)


# A thread that waits asks so often before it lets others have its core.
_PATIENCE = 4000


class Value:
    """A number, a vector or an address in the function that is being written; Python's operators compute with it.

    An address and a number of bytes make an address. Integers, also in lanes, have no sign when they are divided or
    shifted, and have one when they are compared by `<`. A comparison gives what is true or not, lane by lane.
    """

    def __init__(self, code: "Code", value: Any) -> None:
        self.code, self.value = code, value

    def __add__(self, other: "Value | float") -> "Value":
        if self.value.type == POINTER:
            found = self.code.build.gep(self.value, [self._like(other, INT)], source_etype=BYTE)
            return Value(self.code, found)
        return self._computed(other, "add", "fadd")

    def __sub__(self, other: "Value | float") -> "Value":
        return self._computed(other, "sub", "fsub")

    def __mul__(self, other: "Value | float") -> "Value":
        return self._computed(other, "mul", "fmul")

    def __truediv__(self, other: "Value | float") -> "Value":
        return self._computed(other, "fdiv", "fdiv")

    def __floordiv__(self, other: "Value | float") -> "Value":
        return self._computed(other, "udiv", "udiv")

    def __mod__(self, other: "Value | float") -> "Value":
        return self._computed(other, "urem", "urem")

    def __and__(self, other: "Value | int") -> "Value":
        return self._computed(other, "and_")

    def __or__(self, other: "Value | int") -> "Value":
        return self._computed(other, "or_")

    def __xor__(self, other: "Value | int") -> "Value":
        return self._computed(other, "xor")

    def __lshift__(self, other: "Value | int") -> "Value":
        return self._computed(other, "shl")

    def __rshift__(self, other: "Value | int") -> "Value":
        return self._computed(other, "lshr")

    def halved(self, times: int) -> "Value":
        """Divided by 2 so often, rounded down; of an integer with its sign."""
        return self._computed(times, "ashr")

    def __lt__(self, other: "Value | float") -> "Value":
        kind, other = self.value.type, self._like(other, self.value.type)
        compare = self.code.build.icmp_signed if _is_whole(kind) else self.code.build.fcmp_ordered
        return Value(self.code, compare("<", self.value, other))

    def below(self, other: "Value | int") -> "Value":
        """Whether it is less, of integers without a sign; likewise `up_to` and `equals`."""
        return self._compared("<", other)

    def up_to(self, other: "Value | int") -> "Value":
        return self._compared("<=", other)

    def equals(self, other: "Value | int") -> "Value":
        return self._compared("==", other)

    def _compared(self, how: str, other: "Value | int") -> "Value":
        return Value(self.code, self.code.build.icmp_unsigned(how, self.value, self._like(other, self.value.type)))

    def chosen(self, yes: "Value | int", no: "Value | int") -> "Value":
        """`yes` where this comparison holds, else `no`."""
        kind = next(each.value.type for each in (yes, no) if isinstance(each, Value))
        found = self.code.build.select(self.value, self._like(yes, kind), self._like(no, kind))
        return Value(self.code, found)

    def counted(self) -> "Value":
        """1 where this comparison holds, else 0."""
        return self.extended(EIGHT if isinstance(self.value.type, ir.VectorType) else INT)

    def extended(self, kind: Any) -> "Value":
        """An integer without a sign in more bits."""
        return Value(self.code, self.code.build.zext(self.value, kind))

    def cut(self, kind: Any) -> "Value":
        """The lowest bits of an integer."""
        return Value(self.code, self.code.build.trunc(self.value, kind))

    def rounded(self, kind: Any) -> "Value":
        """The nearest number of a kind with fewer digits."""
        return Value(self.code, self.code.build.fptrunc(self.value, kind))

    def seen_as(self, kind: Any) -> "Value":
        """The same bits as of another kind."""
        return Value(self.code, self.code.build.bitcast(self.value, kind))

    def least(self, other: "Value") -> "Value":
        """The lesser of two numbers, lane by lane; the second where one of them is none."""
        return (self < other).chosen(self, other)

    def most(self, other: "Value") -> "Value":
        """The greater of two numbers, lane by lane; the second where one of them is none."""
        return (other < self).chosen(self, other)

    def times_plus(self, factor: "Value", added: "Value") -> "Value":
        """This times a factor and something added, rounded once."""
        return self.code.call("llvm.fma.v16f32", VECTOR, self, factor, added)

    def dotted(self, pairs: "Value", added: "Value") -> "Value":
        """Lane by lane two products of BF16 pairs, added to what there is."""
        both = [Value(self.code, self.code.build.bitcast(each.value, PAIRS)) for each in (self, pairs)]
        return self.code.call("llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, added, *both)

    def total(self) -> "Value":
        """The sum of a vector's lanes, always in the same order."""
        build, found = self.code.build, self.value
        for half in (8, 4, 2, 1):
            lower, upper = (
                build.shuffle_vector(
                    found, found, ir.Constant(ir.VectorType(WORD, half), list(range(start, start + half)))
                )
                for start in (0, half)
            )
            found = build.fadd(lower, upper)
        return Value(self.code, build.extract_element(found, ir.Constant(WORD, 0)))

    def highest(self) -> "Value":
        """The greatest of a vector's lanes; those that are no numbers do not count."""
        return self.code.call("llvm.vector.reduce.fmax.v16f32", FLOAT, self)

    def root(self) -> "Value":
        return self.code.call("llvm.sqrt.f32", FLOAT, self)

    def spread(self) -> "Value":
        """A number in all lanes."""
        build, empty = self.code.build, ir.Constant(VECTOR, ir.Undefined)
        first = build.insert_element(empty, self.value, ir.Constant(WORD, 0))
        return Value(self.code, build.shuffle_vector(first, empty, ir.Constant(BITS, [0] * LANES)))

    def integer(self, offset: "Value | int" = 0) -> "Value":
        """The integer of 64 bits so many bytes behind this address; likewise `address`, `number` and `vector`."""
        return self._read(offset, INT, 8)

    def address(self, offset: "Value | int" = 0) -> "Value":
        return self._read(offset, POINTER, 8)

    def number(self, offset: "Value | int" = 0) -> "Value":
        return self._read(offset, FLOAT, 2)

    def vector(self, offset: "Value | int" = 0) -> "Value":
        return self._read(offset, VECTOR, 4)

    def halves(self, offset: "Value | int" = 0) -> "Value":
        """16 numbers in BF16, as a vector."""
        found = self._read(offset, HALVES, 2)
        return Value(self.code, self.code.build.fpext(found.value, VECTOR))

    def piece(self, kind: Any, offset: "Value | int" = 0) -> "Value":
        """What lies so many bytes behind this address, as of some kind."""
        return self._read(offset, kind, 1)

    def put_text(self, text: bytes, offset: "Value | int" = 0) -> None:
        """Write up to 8 bytes."""
        found = ir.Constant(ir.IntType(8 * len(text)), int.from_bytes(text, "little"))
        self.code.build.store(found, (self + offset).value, align=1)

    def put_byte(self, found: "Value", offset: "Value | int" = 0) -> None:
        """Write the lowest byte of an integer."""
        self.code.build.store(self.code.build.trunc(found.value, BYTE), (self + offset).value, align=1)

    def put(self, found: "Value", offset: "Value | int" = 0) -> None:
        """Write a number or vector so many bytes behind this address."""
        self.code.build.store(found.value, (self + offset).value, align=2)

    def put_halves(self, found: "Value", offset: "Value | int" = 0) -> None:
        """Write a vector as BF16, rounded to the nearest."""
        self.put(Value(self.code, self.code.build.fptrunc(found.value, HALVES)), offset)

    def _read(self, offset: "Value | int", kind: Any, align: int) -> "Value":
        return Value(self.code, self.code.build.load((self + offset).value, typ=kind, align=align))

    def _like(self, other: "Value | float", kind: Any) -> Any:
        if isinstance(other, Value):
            return other.value
        return ir.Constant(kind, [other] * kind.count if isinstance(kind, ir.VectorType) else other)

    def _computed(self, other: "Value | float", integers: str, floats: str = "") -> "Value":
        operation = integers if _is_whole(self.value.type) else floats
        return Value(self.code, getattr(self.code.build, operation)(self.value, self._like(other, self.value.type)))


def _is_whole(kind: Any) -> bool:
    """Whether numbers of a kind are integers."""
    return isinstance(kind.element if isinstance(kind, ir.VectorType) else kind, ir.IntType)


class Variable:
    """A place in the function for what changes: LLVM keeps it in a register."""

    def __init__(self, code: "Code", first: Value) -> None:
        self._code = code
        with code.build.goto_entry_block():
            self._place = code.build.alloca(first.value.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self._code, self._code.build.load(self._place, typ=self._place.allocated_type))

    def set(self, found: Value) -> None:
        self._code.build.store(found.value, self._place)


class Code:
    """One function that is being written: its arguments are integers and addresses; what it gives is an integer that it
    is left with, or nothing."""

    def __init__(self, module: ir.Module, name: str, kinds: Sequence[Any], *, gives: bool = False) -> None:
        self._module = module
        self.function = ir.Function(module, ir.FunctionType(INT if gives else NOTHING, list(kinds)), name)
        self.build = ir.IRBuilder(self.function.append_basic_block())
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def integer(self, value: int) -> Value:
        return Value(self, ir.Constant(INT, value))

    def eight(self, value: int) -> Value:
        """An integer in all of 8 lanes."""
        return Value(self, ir.Constant(EIGHT, [value] * EIGHT.count))

    def holds(self, value: bool) -> Value:
        return Value(self, ir.Constant(ir.IntType(1), value))

    def all_true(self) -> Value:
        """True in all of 8 lanes."""
        return Value(self, ir.Constant(ir.VectorType(ir.IntType(1), EIGHT.count), [True] * EIGHT.count))

    def number(self, value: float) -> Value:
        return Value(self, ir.Constant(FLOAT, value))

    def vector(self, value: float) -> Value:
        return Value(self, ir.Constant(VECTOR, [value] * LANES))

    def call(self, name: str, returns: Any, *values: Value) -> Value:
        """What a function of LLVM's or the C library's gives."""
        function = self._module.globals.get(name)
        if function is None:
            function = ir.Function(self._module, ir.FunctionType(returns, [each.value.type for each in values]), name)
        return Value(self, self.build.call(function, [each.value for each in values]))

    def invoke(self, function: Any, *values: Value) -> None:
        """Call another function of the module."""
        self.build.call(function, [each.value for each in values])

    def leave(self, found: Value) -> None:
        """End here with this integer."""
        self.build.ret(found.value)

    def room(self, kind: Any) -> Value:
        """The address of memory for something of a kind, which is the function's own."""
        with self.build.goto_entry_block():
            return Value(self, self.build.alloca(kind))

    def finish(self, *, called: bool = False) -> Any:
        """End the function, and give it for `invoke`. `called`: it is, and never copied to where it is used."""
        if called:
            self.function.attributes.add("noinline")
        if not self.build.block.is_terminated:
            self.build.ret_void()
        return self.function

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int | Value = 1) -> Iterator[Value]:
        """What is written inside is done for each number from start on that is less than stop."""
        at = Variable(self, start)
        with self.repeated(lambda: at.get() < stop):
            number = at.get()
            yield number
            at.set(number + step)

    @contextmanager
    def repeated(self, condition: Callable[[], Value]) -> Iterator[None]:
        """What is written inside is done as long as the condition holds."""
        asked, inside, behind = (self.function.append_basic_block() for _ in range(3))
        self.build.branch(asked)
        self.build.position_at_end(asked)
        self.build.cbranch(condition().value, inside, behind)
        self.build.position_at_end(inside)
        yield
        self.build.branch(asked)
        self.build.position_at_end(behind)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.build.if_then(condition.value):
            yield

    def either(self, condition: Value, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """What is written by one or the other is done."""
        with self.build.if_else(condition.value) as (then, otherwise):
            with then:
                yes()
            with otherwise:
                no()

    def share(self, counters: Value, parts: Value, before: Callable[[], None], work: Callable[[Value], None]) -> None:
        """Threads that come here share `parts` parts of `work`; nobody goes on before all of them are done.

        Each takes the next part that nobody has, so that one that comes late, or not at all, is waited for by nobody.
        `counters`: two integers that begin at 0, apart in memory. `before` is done by each before its first part.
        """
        taken, done = counters, counters + 64
        mine = Variable(self, self._counted(taken))
        with self.when(mine.get() < parts):
            before()
            with self.repeated(lambda: mine.get() < parts):
                work(mine.get())
                self._counted(done)
                mine.set(self._counted(taken))
        asked = Variable(self, self.integer(0))
        with self.repeated(lambda: self._atomic(done) < parts):
            asked.set(asked.get() + 1)
            self.call("llvm.x86.sse2.pause", NOTHING)
            with self.when(self.integer(_PATIENCE) < asked.get()):
                self.call("sched_yield", WORD)

    def _counted(self, counter: Value) -> Value:
        """What a counter was, which is one more afterwards."""
        return Value(self, self.build.atomic_rmw("add", counter.value, ir.Constant(INT, 1), "acq_rel"))

    def _atomic(self, counter: Value) -> Value:
        return Value(self, self.build.load_atomic(counter.value, "acquire", 8, typ=INT))
