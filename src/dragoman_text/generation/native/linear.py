"""Linear layers in the layout of the kernels, and the functions that compute them."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

import dragoman_kernels
from dragoman_kernels.threads import StepThreads
from dragoman_text.generation.fused import concatenate
from dragoman_text.generation.native.config import COLUMNS, KernelConfig, pad
from dragoman_text.generation.native.structures import COUNTER_BYTES, PANEL_ROWS, LinearCall, LinearLayer


class StepCode:
    """The kernels of a model, and the threads that execute them.

    threads: number of threads, which the caller's is one of.
    """

    def __init__(self, config: KernelConfig) -> None:
        self.config, self.threads = config, 1
        addresses = (ctypes.c_void_p, ctypes.c_void_p)
        self.step = dragoman_kernels.function("step", config.form, *addresses)
        self.linear = dragoman_kernels.function("linear", config.form, *addresses)
        self._step_threads = StepThreads()

    def run(self, function: Callable[..., None], calls: Sequence[tuple[int, ...]], keep_alive: object) -> None:
        """As `StepThreads.run`."""
        self._step_threads.run(function, calls, keep_alive)

    def pack(self, *layers: nn.Linear) -> "BlockLinear":
        """Return several layers with the same input as one."""
        return BlockLinear(self, *concatenate(layers))


class BlockLinear:
    """Linear layer with its weight in the layout of the kernels, which is the only copy of the weight.

    weights: blocks of 64 columns. bias: [padded columns], FP32. layer: both, for the kernels. The result of a row is
    bitwise independent of the other rows and the number of threads.
    """

    min_rows = 1

    def __init__(self, code: StepCode, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._code = code
        config = code.config
        self.out_features, self.in_features = weight.shape
        self.weights = pack_blocks(weight, config)
        self.bias = torch.zeros(pad(self.out_features))
        if bias is not None:
            self.bias[: self.out_features] = bias
        self.layer = LinearLayer(
            self.weights.data_ptr(),
            self.bias.data_ptr(),
            size=self.in_features,
            blocks=pad(self.out_features) // COLUMNS,
            block_bytes=config.block_bytes(self.in_features),
            bf16=config.bf16,
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._sums(rows).to(rows.dtype)

    product = forward

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return (self._sums(rows) + added).to(added.dtype)

    def _sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product in FP32."""
        inputs = rows.reshape(-1, self.in_features).contiguous()
        output = torch.empty(len(inputs), pad(self.out_features))
        counters, sums = np.zeros(COUNTER_BYTES, np.uint8), torch.empty(self._code.threads, PANEL_ROWS, COLUMNS)
        call = LinearCall(
            ctypes.addressof(self.layer),
            inputs.data_ptr(),
            rows=len(inputs),
            row_bytes=self._code.config.item_bytes * self.in_features,
            output=output.data_ptr(),
            counters=counters.ctypes.data,
        )
        calls = [(ctypes.addressof(call), each.data_ptr()) for each in sums]
        self._code.run(self._code.linear, calls, (self, call, counters, inputs, output, sums))
        return output[:, : self.out_features].view(*rows.shape[:-1], self.out_features)


def pack_blocks(weight: torch.Tensor, config: KernelConfig) -> torch.Tensor:
    """Return weights [columns, inputs] as [columns / 64, parts, steps, 64 / parts, inputs of a step].

    The last block is padded with columns of 0.
    """
    columns, inputs = weight.shape
    padded = weight.new_zeros(COLUMNS, inputs)
    shape = (config.parts, COLUMNS // config.parts, inputs // config.pair, config.pair)
    blocks = weight.new_empty(pad(columns) // COLUMNS, shape[0], shape[2], shape[1], shape[3])
    for number, block in enumerate(torch.split(weight.detach(), COLUMNS)):
        padded[: len(block)], padded[len(block) :] = block, 0
        blocks[number] = padded.view(shape).transpose(1, 2)
    return blocks
