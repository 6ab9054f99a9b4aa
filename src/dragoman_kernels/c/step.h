/* Arguments of a step of all layers of a decoder: the structures in dragoman_text/generation/native/structures.py. */
#ifndef DRAGOMAN_STEP_H
#define DRAGOMAN_STEP_H

#include "adapter.h"
#include "attention.h"
#include "product.h"

/* Biases and norms are FP32. window: size of the attention window; 0: unlimited. */
typedef struct {
    const float *input_norm, *query_norm, *key_norm, *mlp_norm;
    linear_layer qkv, out, gate_up, down;
    int64_t window;
} decoder_layer;

/* A model. Shapes of its memory are [rows, ...] unless stated; `padded`: to a multiple of 64. */
typedef struct {
    attention_shape attention;
    int64_t layer_count, hidden, intermediate;
    const decoder_layer *layers;
    const void *embedding; /* [vocabulary, hidden] FP32 or BF16, 0 if it is in a file */
    const segment *embedding_file;
    const float *norm;     /* [hidden]: the norm before the output head */
    linear_layer head;
    const float *rotary; /* [positions, 2, head_size]: cosines, signed sines */
    float *states;       /* [rows, padded hidden] */
    float *qkv;          /* [rows, padded qkv_heads * head_size] */
    void *attended;      /* [rows, query_heads * head_size] FP32 or BF16 */
    float *gates;        /* [rows, padded 2 * intermediate] */
    void *mlp;           /* [rows, padded intermediate] FP32 or BF16 */
} decoder;

/* The linear layers of a decoder's layer, as an adapter numbers them. */
enum { QKV, OUT, GATE_UP, DOWN, LINEAR_LAYERS };

/* Consecutive rows with one adapter, at most ADAPTED_ROWS. layers: [layers, LINEAR_LAYERS]. */
typedef struct {
    int64_t first, rows;
    const adapter_layer *layers;
} adapted_run;

/* A step. keys, values: [layers, slots, kv_heads, length, head_size], with these strides in bytes. */
typedef struct {
    const decoder *model;
    int64_t rows;
    const int64_t *tokens, *positions, *slots;
    void *keys, *values;
    int64_t layer_bytes, slot_bytes, head_bytes;
    int64_t output_count;
    const int64_t *output_rows; /* rows whose logits are computed */
    int64_t run_count;
    const int64_t *runs; /* [runs, 2]: first row and number of consecutive rows of one sequence */
    int64_t adapted_count;
    const adapted_run *adapted;
    float *logits;       /* [output rows, padded vocabulary] */
    void *counters;      /* shared_loop of 0: 7 for each layer, 4 more if any row has an adapter, and 2 */
} decoder_step;

/* Scratch memory of a thread. normed: [rows, hidden] FP32 or BF16. sums: [at most PANEL_ROWS, 64], of as many rows as a step
 * has at most. query: [run_rows,
 * head_size]. scores: [run_rows, score_count]. inputs: of layers whose weights are in blocks. */
typedef struct {
    void *normed;
    float *sums, *query, *scores;
    int64_t score_count;
    block_inputs inputs;
} step_scratch;

#endif
