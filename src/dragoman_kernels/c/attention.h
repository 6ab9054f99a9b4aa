/* Attention of one key-value head for consecutive tokens of one sequence. */
#ifndef DRAGOMAN_ATTENTION_H
#define DRAGOMAN_ATTENTION_H

#include "form.h"

/* Tokens that attend together, at most. */
#define MOST_RUN_ROWS 4
/* The largest size of a head; a multiple of 32. */
#define MOST_HEAD_SIZE 512

/* What is the same for all rows. As AttentionShape in dragoman_text. bf16: keys, values and output; else FP32. qk_norm:
 * queries and keys are normalized. */
typedef struct {
    int64_t query_heads, kv_heads, head_size, qk_norm, bf16;
    float eps, scaling;
} attention_shape;

/* One row (token) and one key-value head. As AttentionHead in dragoman_text.
 *
 * position: of the token in its sequence; it attends to positions from `first` to its own.
 * qkv: its queries, keys and values [query_heads + 2 * kv_heads, head_size].
 * rotary: cosines and signed sines of its position, [2, head_size].
 * keys, values: those of the head in the cache, [length, head_size].
 * output: [query_heads, head_size].
 * query_norm, key_norm: weights of the norms.
 * query: [head_size], scratch memory. scores: [position + 1 - first], with 16 numbers of padding behind it. */
typedef struct {
    int64_t head, position, first;
    const float *qkv, *rotary;
    void *keys, *values, *output;
    const float *query_norm, *key_norm;
    float *query, *scores;
} attention_head;

/* Write the row's key, rotated, and value into the cache. */
EXPORT void NAME(store_key_value)(const attention_shape *shape, const attention_head *at);

/* Compute the attention of one head for `count` consecutive rows of one sequence: 1, or those that attend together, reading
 * keys and values once. These are 4 for heads of 32 and 64 and 2 for heads of 128, as many as fit into registers; for other
 * heads, and in the portable form, 1. */
EXPORT void NAME(attend)(const attention_shape *shape, const attention_head *rows, int64_t count);

#endif
