/* The exponential function and the rounding to BF16 of vectors.h, for their tests. */
#include "norm.h"

/* Replace numbers by their exponentials. count: a multiple of 16. */
EXPORT void NAME(exponentials)(float *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        store(numbers + i, exponential(load(numbers + i)));
}

/* Set `rounded` to the nearest BF16 numbers. count: a multiple of 16. */
EXPORT void NAME(round_to_bf16)(const float *numbers, uint16_t *rounded, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        store_bf16(rounded + i, load(numbers + i));
}
