/* Linear layers, and their products with rows of inputs. */
#ifndef DRAGOMAN_PRODUCT_H
#define DRAGOMAN_PRODUCT_H

#include "blocks.h"

/* Columns (outputs) of a block of weights. */
#define COLUMNS 64
/* Inputs of a row of weights in blocks whose activations have one scale. */
#define GROUP 32
/* Products of more rows are computed in panels of this many, whose sums stay in the first-level cache. */
#define PANEL_ROWS 96

/* Weights in the layout that product.c describes. size: number of inputs. bias: [64 * blocks], FP32. Weights and inputs are
 * BF16 if `bf16`, else FP32. blocked: 0, or weights in blocks (blocks.h), which then replace those of this structure. As
 * LinearLayer in dragoman_text. */
typedef struct {
    const void *weights;
    const float *bias;
    int64_t size, blocks, block_bytes, bf16;
    const block_layer *blocked;
} linear_layer;

/* As LinearCall in dragoman_text. counters: one shared_loop of 0. */
typedef struct {
    const linear_layer *layer;
    const void *inputs;
    int64_t rows, row_bytes;
    float *output;
    void *counters;
} linear_call;

INLINE int64_t panels_of(int64_t rows) { return (rows + PANEL_ROWS - 1) / PANEL_ROWS; }

/* Set sums [rows, 64] to the product of inputs [rows, size] with one block of weights. */
EXPORT void NAME(product)(const void *inputs, int64_t row_bytes, const void *weights, float *sums, int64_t rows,
                          int64_t size, int64_t bf16);

/* Compute one block of columns for a panel of rows, and write or add it to output [rows, output_columns]. Consecutive parts,
 * of panels_of(rows) * blocks, share a block while it is in the cache. sums: [PANEL_ROWS, 64], of the thread. */
EXPORT void NAME(product_part)(const linear_layer *layer, const void *inputs, int64_t row_bytes, int64_t rows,
                               int64_t part, float *sums, float *output, int64_t output_columns, int64_t add_to_output);

#endif
