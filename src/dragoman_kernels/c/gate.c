/* The activation of a gated MLP: silu(gate) * up. */
#include "gate.h"
#include "norm.h"

EXPORT void NAME(gate)(const float *gates, void *output, int64_t size, int64_t bf16)
{
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        floats gated = load(gates + i), up = load(gates + size + i);
        floats result = mul(divide(gated, add(exponential(sub(all(0), gated)), all(1))), up);
        store_items(output, i, result, (int)bf16);
    }
    if (i < size) { /* the rest, computed as part of a whole vector */
        float parts[2][LANES] = {{0}};
        char rest[4 * LANES];
        memcpy(parts[0], gates + i, (size_t)(size - i) * 4);
        memcpy(parts[1], gates + size + i, (size_t)(size - i) * 4);
        floats gated = load(parts[0]), up = load(parts[1]);
        store_items(rest, 0, mul(divide(gated, add(exponential(sub(all(0), gated)), all(1))), up), (int)bf16);
        memcpy((char *)output + i * (bf16 ? 2 : 4), rest, (size_t)(size - i) * (bf16 ? 2 : 4));
    }
}
