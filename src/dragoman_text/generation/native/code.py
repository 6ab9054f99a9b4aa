"""Functions in machine code, written as Python expressions and compiled by LLVM for this CPU."""

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir

LANES = 16
INT64, INT32, INT8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)
FLOAT, POINTER, VOID = ir.FloatType(), ir.PointerType(), ir.VoidType()


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no type annotations
    """LLVM's `bfloat`, which llvmlite does not define."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


VECTOR, INT32_VECTOR = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
INT16 = ir.IntType(16)
INT16_VECTOR, INT16_PAIRS = ir.VectorType(INT16, LANES), ir.VectorType(INT16, 2 * LANES)
BF16_VECTOR, BF16_PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)

# A waiting thread spins this often before it yields its core.
_SPINS = 4000


class Value:
    """A number, vector or address in the function being written; Python's operators emit instructions.

    Address + bytes is an address. Division of integers is unsigned, `<` is signed. Comparisons of
    vectors are lane by lane.
    """

    def __init__(self, code: "Code", value: Any) -> None:
        self.code, self.value = code, value

    def __add__(self, other: "Value | float") -> "Value":
        if self.value.type == POINTER:
            address = self.code.build.gep(self.value, [self._operand(other, INT64)], source_etype=INT8)
            return Value(self.code, address)
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: "Value | float") -> "Value":
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: "Value | float") -> "Value":
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: "Value | float") -> "Value":
        return self._binary(other, "fdiv", "fdiv")

    def __floordiv__(self, other: "Value | float") -> "Value":
        return self._binary(other, "udiv", "udiv")

    def __mod__(self, other: "Value | float") -> "Value":
        return self._binary(other, "urem", "urem")

    def __lshift__(self, other: "Value | int") -> "Value":
        return self._binary(other, "shl")

    def __rshift__(self, other: "Value | int") -> "Value":
        return self._binary(other, "lshr")

    def shift_right_signed(self, bits: int) -> "Value":
        return self._binary(bits, "ashr")

    def __and__(self, other: "Value | int") -> "Value":
        return self._binary(other, "and_")

    def __or__(self, other: "Value | int") -> "Value":
        return self._binary(other, "or_")

    def __lt__(self, other: "Value | float") -> "Value":
        type_, other = self.value.type, self._operand(other, self.value.type)
        compare = self.code.build.icmp_signed if _is_integer(type_) else self.code.build.fcmp_ordered
        return Value(self.code, compare("<", self.value, other))

    def equal(self, other: "Value | int") -> "Value":
        return self._compare("==", other)

    def _compare(self, operator: str, other: "Value | int") -> "Value":
        found = self.code.build.icmp_unsigned(operator, self.value, self._operand(other, self.value.type))
        return Value(self.code, found)

    def select(self, yes: "Value | int", no: "Value | int") -> "Value":
        """`yes` where this comparison is true, else `no`."""
        type_ = next(each.value.type for each in (yes, no) if isinstance(each, Value))
        return Value(self.code, self.code.build.select(self.value, self._operand(yes, type_), self._operand(no, type_)))

    def truncate(self, type_: Any) -> "Value":
        return Value(self.code, self.code.build.trunc(self.value, type_))

    def round_to(self, type_: Any) -> "Value":
        """The nearest number of a narrower floating-point type."""
        return Value(self.code, self.code.build.fptrunc(self.value, type_))

    def to_float(self) -> "Value":
        """Signed integers of 16 lanes as FP32."""
        return Value(self.code, self.code.build.sitofp(self.value, VECTOR))

    def shuffle(self, other: "Value", order: Sequence[int]) -> "Value":
        """The lanes with these indices, where those of `other` follow those of this vector."""
        mask = ir.Constant(ir.VectorType(INT32, len(order)), list(order))
        return Value(self.code, self.code.build.shuffle_vector(self.value, other.value, mask))

    def bitcast(self, type_: Any) -> "Value":
        return Value(self.code, self.code.build.bitcast(self.value, type_))

    def minimum(self, other: "Value") -> "Value":
        """The smaller number, lane by lane; `other` if one is NaN."""
        return (self < other).select(self, other)

    def maximum(self, other: "Value") -> "Value":
        """The larger number, lane by lane; `other` if one is NaN."""
        return (other < self).select(self, other)

    def fma(self, factor: "Value", addend: "Value") -> "Value":
        """self * factor + addend, rounded once."""
        return self.code.call_external("llvm.fma.v16f32", VECTOR, self, factor, addend)

    def dot_bf16(self, pairs: "Value", addend: "Value") -> "Value":
        """Add the two products of each lane's BF16 pair to the addend (vdpbf16ps)."""
        return self.code.call_external(
            "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, addend, self.bitcast(BF16_PAIRS), pairs.bitcast(BF16_PAIRS)
        )

    def lane_sum(self) -> "Value":
        """The sum of the lanes, always in the same order."""
        build, found = self.code.build, self.value
        for half in (8, 4, 2, 1):
            lower, upper = (
                build.shuffle_vector(
                    found, found, ir.Constant(ir.VectorType(INT32, half), list(range(start, start + half)))
                )
                for start in (0, half)
            )
            found = build.fadd(lower, upper)
        return Value(self.code, build.extract_element(found, ir.Constant(INT32, 0)))

    def lane_max(self) -> "Value":
        """The largest lane; NaN lanes are ignored."""
        return self.code.call_external("llvm.vector.reduce.fmax.v16f32", FLOAT, self)

    def sqrt(self) -> "Value":
        return self.code.call_external("llvm.sqrt.f32", FLOAT, self)

    def broadcast(self, type_: Any = VECTOR) -> "Value":
        """A vector with this number in all lanes."""
        build, empty = self.code.build, ir.Constant(type_, ir.Undefined)
        first = build.insert_element(empty, self.value, ir.Constant(INT32, 0))
        order = ir.Constant(ir.VectorType(INT32, type_.count), [0] * type_.count)
        return Value(self.code, build.shuffle_vector(first, empty, order))

    # --- memory: `offset` is in bytes from this address ------------------------------------------------------

    def load(self, type_: Any, offset: "Value | int" = 0, align: int = 1) -> "Value":
        return Value(self.code, self.code.build.load((self + offset).value, typ=type_, align=align))

    def load_int(self, offset: "Value | int" = 0) -> "Value":
        return self.load(INT64, offset, 8)

    def load_pointer(self, offset: "Value | int" = 0) -> "Value":
        return self.load(POINTER, offset, 8)

    def load_float(self, offset: "Value | int" = 0) -> "Value":
        return self.load(FLOAT, offset, 2)

    def load_vector(self, offset: "Value | int" = 0) -> "Value":
        return self.load(VECTOR, offset, 4)

    def load_bf16(self, offset: "Value | int" = 0) -> "Value":
        """16 BF16 numbers as a vector of FP32."""
        return Value(self.code, self.code.build.fpext(self.load(BF16_VECTOR, offset, 2).value, VECTOR))

    def broadcast_bf16(self, offset: "Value | int" = 0) -> "Value":
        """A BF16 number as FP32 in all lanes."""
        return (self.load(INT16, offset, 2).broadcast(INT16_PAIRS).bitcast(INT32_VECTOR) << 16).bitcast(VECTOR)

    def prefetch(self, offset: "Value | int" = 0) -> None:
        """Load a cache line into the first-level cache, if the address is valid."""
        kind = [Value(self.code, ir.Constant(INT32, number)) for number in (0, 3, 1)]  # to read, into all levels, data
        self.code.call_external("llvm.prefetch.p0", VOID, self + offset, *kind)

    def store(self, value: "Value", offset: "Value | int" = 0) -> None:
        self.code.build.store(value.value, (self + offset).value, align=2)

    def store_bf16(self, value: "Value", offset: "Value | int" = 0) -> None:
        """Store a vector of FP32 as BF16, rounded to nearest, with the instructions for BF16 of AVX-512."""
        self.store(value.round_to(BF16_VECTOR), offset)

    def store_bf16_bits(self, value: "Value", offset: "Value | int" = 0) -> None:
        """As `store_bf16`, on any CPU."""
        bits = value.bitcast(INT32_VECTOR)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # ties to even; adding to a NaN may carry into its sign
        is_nan = Value(self.code, self.code.build.fcmp_unordered("uno", value.value, value.value))
        self.store((is_nan.select(bits | 0x400000, rounded) >> 16).truncate(INT16_VECTOR), offset)

    def _operand(self, other: "Value | float", type_: Any) -> Any:
        if isinstance(other, Value):
            return other.value
        return ir.Constant(type_, [other] * type_.count if isinstance(type_, ir.VectorType) else other)

    def _binary(self, other: "Value | float", integers: str, floats: str = "") -> "Value":
        operation = integers if _is_integer(self.value.type) else floats
        return Value(self.code, getattr(self.code.build, operation)(self.value, self._operand(other, self.value.type)))


def _is_integer(type_: Any) -> bool:
    return isinstance(type_.element if isinstance(type_, ir.VectorType) else type_, ir.IntType)


class Variable:
    """A mutable local variable; LLVM keeps it in a register."""

    def __init__(self, code: "Code", first: Value) -> None:
        self._code = code
        with code.build.goto_entry_block():
            self._slot = code.build.alloca(first.value.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self._code, self._code.build.load(self._slot, typ=self._slot.allocated_type))

    def set(self, value: Value) -> None:
        self._code.build.store(value.value, self._slot)


class Code:
    """A function being written; it returns nothing."""

    def __init__(self, module: ir.Module, name: str, types: Sequence[Any]) -> None:
        self._module = module
        self.function = ir.Function(module, ir.FunctionType(VOID, list(types)), name)
        self.build = ir.IRBuilder(self.function.append_basic_block())
        self.arguments = [Value(self, argument) for argument in self.function.args]

    # --- constants -------------------------------------------------------------------------------------------

    def integer(self, value: int) -> Value:
        return Value(self, ir.Constant(INT64, value))

    def number(self, value: float) -> Value:
        return Value(self, ir.Constant(FLOAT, value))

    def constant(self, type_: Any, lanes: Sequence[float]) -> Value:
        return Value(self, ir.Constant(type_, list(lanes)))

    def vector(self, value: float) -> Value:
        return Value(self, ir.Constant(VECTOR, [value] * LANES))

    # --- functions -------------------------------------------------------------------------------------------

    def call_external(self, name: str, returns: Any, *values: Value) -> Value:
        """Call an LLVM intrinsic or a function of the C library."""
        function = self._module.globals.get(name)
        if function is None:
            function = ir.Function(self._module, ir.FunctionType(returns, [each.value.type for each in values]), name)
        return Value(self, self.build.call(function, [each.value for each in values]))

    def call_function(self, function: Any, *values: Value) -> None:
        """Call another function of the module, as `finish` returned it."""
        self.build.call(function, [each.value for each in values])

    def finish(self, *, noinline: bool = False) -> Any:
        if noinline:
            self.function.attributes.add("noinline")
        if not self.build.block.is_terminated:
            self.build.ret_void()
        return self.function

    # --- control flow ----------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int | Value = 1) -> Iterator[Value]:
        """Execute the body for each number of range(start, stop, step)."""
        current = Variable(self, start)
        with self.while_loop(lambda: current.get() < stop):
            number = current.get()
            yield number
            current.set(number + step)

    @contextmanager
    def while_loop(self, condition: Callable[[], Value]) -> Iterator[None]:
        test, body, end = (self.function.append_basic_block() for _ in range(3))
        self.build.branch(test)
        self.build.position_at_end(test)
        self.build.cbranch(condition().value, body, end)
        self.build.position_at_end(body)
        yield
        self.build.branch(test)
        self.build.position_at_end(end)

    @contextmanager
    def if_true(self, condition: Value) -> Iterator[None]:
        with self.build.if_then(condition.value):
            yield

    def if_else(self, condition: Value, yes: Callable[[], None], no: Callable[[], None]) -> None:
        with self.build.if_else(condition.value) as (then, otherwise):
            with then:
                yes()
            with otherwise:
                no()

    def share_work(
        self, counters: Value, parts: Value, prepare: Callable[[], None], work: Callable[[Value], None]
    ) -> None:
        """Divide `work(part)` for `parts` parts among the threads that execute this; all wait for the last part.

        A thread takes the next free part, so a thread that arrives late, or never, delays no other. Each thread calls
        `prepare` before its first part. counters: two int64 of 0, 64 bytes apart.
        """
        next_part, done = counters, counters + 64
        part = Variable(self, self._fetch_add(next_part))
        with self.if_true(part.get() < parts):
            prepare()
            with self.while_loop(lambda: part.get() < parts):
                work(part.get())
                self._fetch_add(done)
                part.set(self._fetch_add(next_part))
        spins = Variable(self, self.integer(0))
        with self.while_loop(lambda: self._load_atomic(done) < parts):
            spins.set(spins.get() + 1)
            self.call_external("llvm.x86.sse2.pause", VOID)
            with self.if_true(self.integer(_SPINS) < spins.get()):
                self.call_external("sched_yield", INT32)

    def _fetch_add(self, counter: Value) -> Value:
        return Value(self, self.build.atomic_rmw("add", counter.value, ir.Constant(INT64, 1), "acq_rel"))

    def _load_atomic(self, counter: Value) -> Value:
        return Value(self, self.build.load_atomic(counter.value, "acquire", 8, typ=INT64))


class Compiled:
    """A module compiled for this CPU. Its functions run without the interpreter lock.

    instructions: instruction set extensions that the code may use, by LLVM's names, besides those of every x86-64 CPU;
    none: all of this CPU.
    """

    def __init__(self, module: ir.Module, instructions: Collection[str] = ()) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_default_triple()
        cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
        if instructions:
            cpu, features = "x86-64", ",".join(f"+{each}" for each in sorted(instructions))
        self._machine = target.create_target_machine(cpu=cpu, features=features, opt=3)
        module.triple = self._machine.triple
        self._module = binding.parse_assembly(str(module))
        options = binding.create_pipeline_tuning_options(speed_level=3)
        passes = binding.create_pass_builder(self._machine, options)
        passes.getModulePassManager().run(self._module, passes)
        self._engine = binding.create_mcjit_compiler(self._module, self._machine)
        self._engine.finalize_object()

    def assembly(self) -> str:
        """Return the code as text."""
        return str(self._machine.emit_assembly(self._module))

    def function(self, name: str, arguments: int) -> Callable[..., Any]:
        """Return a function of this many integers or addresses; it keeps the code alive."""
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)
        found = prototype(self._engine.get_function_address(name))
        found.code = self._engine  # type: ignore[attr-defined]
        return found


def cpu_features() -> set[str]:
    """Return the instruction set extensions of this CPU, by LLVM's names."""
    return {name for name, available in binding.get_host_cpu_features().items() if available}
