"""Modules of functions compiled by LLVM for the machine at hand."""

import ctypes
from collections.abc import Callable
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
