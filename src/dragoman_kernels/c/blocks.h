/* Linear layers whose weights are in blocks: in those of a GGUF file, or in blocks that were made at load. */
#ifndef DRAGOMAN_BLOCKS_H
#define DRAGOMAN_BLOCKS_H

#include "form.h"

/* Rows of weights of one tensor. type: its number in files, or one of ours (blocks.c). first: the output of its first
 * row. head: 0, or the size of heads whose rows are in pairs, as llama.cpp's rotary embedding reads them: row 2 i + j of
 * a head is output i + j * head / 2 of that head. */
typedef struct {
    int64_t type;
    const uint8_t *weights;
    int64_t columns, row_bytes, first, head;
} segment;

/* Tensors with the same `size` inputs, a multiple of 32. bias: 0, or of all outputs. blocks: parts of 64 columns of all
 * tensors. rounds, floats: whether any tensor needs rounded inputs, or inputs in FP32. order: 0, or for each of the
 * tensors' inputs which of the layer's it is. */
typedef struct {
    const segment *segments;
    const float *bias;
    int64_t size, blocks, rounds, floats;
    const int64_t *order;
} block_layer;

/* Memory of the inputs of all rows as the kernel reads them: integers [size / 32, rows, 32] with scales
 * [size / 32, rows] and sums of 16 values [size / 32, rows, 2]; FP32 [size / 32, rows, 32]. */
typedef struct {
    int8_t *values;
    float *scales;
    int32_t *sums;
    float *floats;
} block_inputs;

/* inputs: [rows, size], FP32. output: [rows, output_floats]. loops: two shared_loop of 0. */
typedef struct {
    const block_layer *layer;
    const float *inputs;
    int64_t rows;
    float *output;
    int64_t output_floats;
    block_inputs memory;
    void *loops;
} block_call;

/* Write one of `rows` rows of inputs [size], FP32 or BF16, to the memory. */
EXPORT void NAME(blocks_read)(const block_layer *layer, const void *inputs, int64_t bf16, int64_t rows, int64_t row,
                              const block_inputs *memory);

/* Compute 64 columns of a tensor for at most 96 rows, of `blocks` times the panels of 96 rows, and write them to the
 * output [rows, output_floats] or add them to it. */
EXPORT void NAME(blocks_part)(const block_layer *layer, const block_inputs *memory, int64_t rows, int64_t part,
                              float *output, int64_t output_floats, int64_t add_to_output);

/* Compute a whole product. All threads that call it with the same arguments divide the work. */
EXPORT void NAME(blocks_linear)(const block_call *call);

/* Write rows of a tensor in FP32 to the output [count, size]. */
EXPORT void NAME(blocks_rows)(int64_t type, const uint8_t *weights, int64_t row_bytes, int64_t size, const int64_t *rows,
                              int64_t count, float *output);

#endif
