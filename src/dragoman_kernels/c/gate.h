/* The activation of a gated MLP. */
#ifndef DRAGOMAN_GATE_H
#define DRAGOMAN_GATE_H

#include "form.h"

/* Set output [size], FP32 or BF16, to silu(gate) * up; gates: both halves, [2, size] FP32. */
EXPORT void NAME(gate)(const float *gates, void *output, int64_t size, int64_t bf16);

#endif
