/* Root mean square norm of one row, for the kernels that have it inside. */
#ifndef DRAGOMAN_NORM_H
#define DRAGOMAN_NORM_H

#include "form.h"

/* Square root of a positive number by the CPU's instruction: libm's would be the only function that we need of it. */
INLINE float square_root(float number) { return __builtin_sqrtf(number); }

/* 1 / sqrt(mean of squares + eps); one sum per lane in the order of the numbers, then `lane_sum`. */
INLINE float reciprocal_rms(const float *states, int64_t size, float eps)
{
    floats squares = all(0);
    for (int64_t i = 0; i < size; i += LANES) {
        floats each = load(states + i);
        squares = mul_add(each, each, squares);
    }
    return 1.0f / square_root(lane_sum(squares) / (float)size + eps);
}

INLINE floats load_items(const void *from, int64_t index, int bf16)
{
    return bf16 ? load_bf16((const uint16_t *)from + index) : load((const float *)from + index);
}

INLINE void store_items(void *to, int64_t index, floats a, int bf16)
{
    if (bf16)
        store_bf16((uint16_t *)to + index, a);
    else
        store((float *)to + index, a);
}

/* Write the normalized states to the output, from index `first` on. */
INLINE void norm_row(const float *states, const float *weight, void *output, int64_t first, int64_t size, float eps,
                     int bf16)
{
    floats scale = all(reciprocal_rms(states, size, eps));
    for (int64_t i = 0; i < size; i += LANES)
        store_items(output, first + i, mul(mul(load(states + i), scale), load(weight + i)), bf16);
}

#endif
