/* Arguments of a step of all layers of a decoder: the structures in dragoman_text/generation/native/structures.py. */
#ifndef DRAGOMAN_STEP_H
#define DRAGOMAN_STEP_H

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
    float *logits;       /* [output rows, padded vocabulary] */
    void *counters;      /* [7 * layers + 2] shared_loop of 0 */
} decoder_step;

/* Scratch memory of a thread. normed: [rows, hidden] FP32 or BF16. sums: [at most PANEL_ROWS, 64]. query: [run_rows,
 * head_size]. scores: [run_rows, score_count]. inputs: of layers whose weights are in blocks. */
typedef struct {
    void *normed;
    float *sums, *query, *scores;
    int64_t score_count;
    block_inputs inputs;
} step_scratch;

#endif
