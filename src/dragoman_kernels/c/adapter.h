/* Contributions of LoRA adapters to the outputs of a linear layer. */
#ifndef DRAGOMAN_ADAPTER_H
#define DRAGOMAN_ADAPTER_H

#include "form.h"

/* Rows of one adapter that are computed together, with weights that are read once. */
#define ADAPTED_ROWS 4
/* Ranks whose sums are kept at once. The rank of a part is padded to a multiple of RANKS with weights of 0. */
#define KEPT_RANKS 64
#define RANKS 4

/* Outputs of a block of `up`. */
#define OUTPUTS 64

/* Weights for `count` outputs of a layer from `first` on, in the order in which they are read, BF16 or FP32 as the inputs
 * are. down: [rank / RANKS, size / LANES, RANKS, LANES]. up: [count padded / OUTPUTS, rank, OUTPUTS]. size: number of inputs,
 * padded to LANES. As AdapterPart in dragoman_text. */
typedef struct {
    const void *down, *up;
    int64_t rank, size, first, count;
} adapter_part;

/* The parts of an adapter for one layer. */
typedef struct {
    const adapter_part *parts;
    int64_t count;
} adapter_layer;

/* Add an adapter's contributions to output [rows, output_columns], for at most ADAPTED_ROWS rows of inputs. sums:
 * [rows, KEPT_RANKS], of the thread. */
EXPORT void NAME(adapt)(const adapter_layer *layer, const void *inputs, int64_t row_bytes, int64_t rows, int64_t bf16,
                        float *sums, float *output, int64_t output_columns);

#endif
