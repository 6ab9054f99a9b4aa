/* Root mean square norm (Zhang and Sennrich 2019). */
#include "norm.h"

/* Set output [rows, hidden] to the normalized states [rows, row_floats], FP32 or BF16. `hidden` is a multiple of 16. */
EXPORT void NAME(norm)(const float *states, int64_t row_floats, const float *weight, void *output, int64_t rows,
                       int64_t hidden, float eps, int64_t bf16)
{
    for (int64_t row = 0; row < rows; row++)
        norm_row(states + row * row_floats, weight, output, row * hidden, hidden, eps, (int)bf16);
}
