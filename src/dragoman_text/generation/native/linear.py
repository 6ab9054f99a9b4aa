"""Linear layers in the layout of the kernels, and the compiled code that computes them."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from dragoman_kernels.threads import StepThreads
from dragoman_text.generation.fused import concatenate
from dragoman_text.generation.native.code import Compiled
from dragoman_text.generation.native.forward import COUNTER_BYTES, PANEL_ROWS, LinearArg, build_module
from dragoman_text.generation.native.kernels import COLUMNS, KernelConfig, pad
from dragoman_text.generation.native.quantized import pack_quantized


@lru_cache(16)
def _compile(config: KernelConfig, scaling: float) -> Compiled:
    """Compile the code, which has no state, once for all models of the same dimensions."""
    return Compiled(build_module(config, scaling), config.instructions)


class StepCode:
    """The functions of `forward.build_module`, compiled for a model, and the threads that execute them.

    threads: number of threads, which the caller's is one of.
    """

    def __init__(self, config: KernelConfig, scaling: float) -> None:
        self.config, self.threads = config, 1
        compiled = _compile(config, scaling)
        self.step, self.linear = compiled.function("step", 2), compiled.function("linear", 2)
        self._step_threads = StepThreads()

    def run(self, function: Callable[..., None], calls: Sequence[tuple[int, ...]], keep_alive: object) -> None:
        """As `StepThreads.run`."""
        self._step_threads.run(function, calls, keep_alive)

    def pack(self, *layers: nn.Linear) -> "BlockLinear":
        """Return several layers with the same input as one."""
        return BlockLinear(self, *concatenate(layers))


class BlockLinear:
    """Linear layer with its weight in the layout of the kernels, which is the only copy of the weight.

    weights: blocks of 64 columns. bias: [padded columns], FP32. The result of a row is bitwise independent of the other
    rows and the number of threads.
    """

    min_rows = 1

    def __init__(self, code: StepCode, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._code = code
        self.out_features, self.in_features = weight.shape
        self.weights = pack_quantized(weight, code.config) if code.config.bits else pack_blocks(weight, code.config)
        self.bias = torch.zeros(pad(self.out_features))
        if bias is not None:
            self.bias[: self.out_features] = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._sums(rows).to(rows.dtype)

    product = forward

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return (self._sums(rows) + added).to(added.dtype)

    def _sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product in FP32."""
        config, threads = self._code.config, self._code.threads
        inputs = rows.reshape(-1, self.in_features).contiguous()
        output = torch.empty(len(inputs), pad(self.out_features))
        counters, sums = np.zeros(COUNTER_BYTES, np.uint8), torch.empty(threads, PANEL_ROWS, COLUMNS)
        table = np.zeros(len(LinearArg), np.int64)
        table[LinearArg.INPUTS], table[LinearArg.ROWS] = inputs.data_ptr(), len(inputs)
        table[LinearArg.ROW_BYTES] = config.item_bytes * self.in_features
        table[LinearArg.STEPS] = config.steps(self.in_features)
        table[LinearArg.WEIGHTS], table[LinearArg.BLOCKS] = self.weights.data_ptr(), pad(self.out_features) // COLUMNS
        table[LinearArg.BLOCK_BYTES] = config.block_bytes(self.in_features)
        table[LinearArg.BIAS], table[LinearArg.OUTPUT] = self.bias.data_ptr(), output.data_ptr()
        table[LinearArg.COUNTERS] = counters.ctypes.data
        calls = [(table.ctypes.data, each.data_ptr()) for each in sums]
        self._code.run(self._code.linear, calls, (self, table, counters, inputs, output, sums))
        return output[:, : self.out_features].view(*rows.shape[:-1], self.out_features)


def pack_blocks(weight: torch.Tensor, config: KernelConfig) -> torch.Tensor:
    """Return weights [columns, inputs] as [columns / 64, parts, steps, 64 / parts, inputs of a step].

    The last block is padded with columns of 0.
    """
    columns, inputs = weight.shape
    padded = weight.new_zeros(COLUMNS, inputs)
    shape = (config.parts, COLUMNS // config.parts, config.steps(inputs), config.pair)
    blocks = weight.new_empty(pad(columns) // COLUMNS, shape[0], shape[2], shape[1], shape[3])
    for number, block in enumerate(torch.split(weight.detach(), COLUMNS)):
        padded[: len(block)], padded[len(block) :] = block, 0
        blocks[number] = padded.view(shape).transpose(1, 2)
    return blocks
