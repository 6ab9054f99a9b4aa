/* Contributions of LoRA adapters (Hu et al. 2021): output += up (down input).
 *
 * down: one sum per lane along the inputs, then `lane_sum`. up: one chain of multiply-adds along the ranks, which begins
 * with the output. Neither depends on other rows: a row has the same bits in any batch. */
#include "adapter.h"
#include "norm.h"

#define VECTORS (OUTPUTS / LANES)

/* Set sums [rows, KEPT_RANKS] of RANKS ranks to the products of their weights with the inputs. */
INLINE void project(const int rows, const int bf16, const char *inputs, int64_t row_bytes, const void *down,
                    int64_t first, int64_t size, float *sums)
{
    floats totals[ADAPTED_ROWS][RANKS];
    UNROLL for (int row = 0; row < rows; row++)
    {
        UNROLL for (int rank = 0; rank < RANKS; rank++) totals[row][rank] = all(0);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        floats weights[RANKS];
        UNROLL for (int rank = 0; rank < RANKS; rank++)
            weights[rank] = load_items(down, first * size + i * RANKS + rank * LANES, bf16);
        UNROLL for (int row = 0; row < rows; row++)
        {
            floats input = load_items(inputs + row * row_bytes, i, bf16);
            UNROLL for (int rank = 0; rank < RANKS; rank++)
                totals[row][rank] = mul_add(input, weights[rank], totals[row][rank]);
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
    {
        UNROLL for (int rank = 0; rank < RANKS; rank++)
            sums[row * KEPT_RANKS + rank] = lane_sum(totals[row][rank]);
    }
}

/* Add the products of sums [rows, KEPT_RANKS] with weights of a block, from index `first` on, to `vectors` vectors. */
INLINE void raise(const int rows, const int bf16, const int vectors, const float *sums, int64_t ranks, const void *up,
                  int64_t first, float *output, int64_t output_columns)
{
    floats totals[ADAPTED_ROWS][VECTORS];
    UNROLL for (int row = 0; row < rows; row++)
    {
        UNROLL for (int i = 0; i < vectors; i++) totals[row][i] = load(output + row * output_columns + i * LANES);
    }
    for (int64_t rank = 0; rank < ranks; rank++) {
        floats weights[VECTORS];
        UNROLL for (int i = 0; i < vectors; i++)
            weights[i] = load_items(up, first + rank * OUTPUTS + i * LANES, bf16);
        UNROLL for (int row = 0; row < rows; row++)
        {
            UNROLL for (int i = 0; i < vectors; i++)
                totals[row][i] = mul_add(all(sums[row * KEPT_RANKS + rank]), weights[i], totals[row][i]);
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
    {
        UNROLL for (int i = 0; i < vectors; i++) store(output + row * output_columns + i * LANES, totals[row][i]);
    }
}

/* As `raise`, for the first `count` outputs of a block. */
INLINE void raise_some(const int rows, const int bf16, int64_t count, const float *sums, int64_t ranks, const void *up,
                       int64_t first, float *output, int64_t output_columns)
{
    float some[ADAPTED_ROWS * OUTPUTS] = {0};
    for (int row = 0; row < rows; row++)
        memcpy(some + row * OUTPUTS, output + row * output_columns, (size_t)count * 4);
    raise(rows, bf16, VECTORS, sums, ranks, up, first, some, OUTPUTS);
    for (int row = 0; row < rows; row++)
        memcpy(output + row * output_columns, some + row * OUTPUTS, (size_t)count * 4);
}

INLINE void add_part(const int rows, const int bf16, const adapter_part *part, const char *inputs, int64_t row_bytes,
                     float *sums, float *output, int64_t output_columns)
{
    output += part->first;
    for (int64_t first = 0; first < part->rank; first += KEPT_RANKS) {
        const int64_t ranks = smaller(KEPT_RANKS, part->rank - first);
        for (int64_t rank = 0; rank < ranks; rank += RANKS)
            project(rows, bf16, inputs, row_bytes, part->down, first + rank, part->size, sums + rank);
        for (int64_t i = 0; i < part->count; i += OUTPUTS) {
            const int64_t up = i * part->rank + first * OUTPUTS;
            if (i + OUTPUTS <= part->count)
                raise(rows, bf16, VECTORS, sums, ranks, part->up, up, output + i, output_columns);
            else
                raise_some(rows, bf16, part->count - i, sums, ranks, part->up, up, output + i, output_columns);
        }
    }
}

#define ADD(rows)                                                                                                      \
    NOINLINE void add_##rows(const adapter_part *part, const char *inputs, int64_t row_bytes, int64_t bf16,           \
                             float *sums, float *output, int64_t output_columns)                                       \
    {                                                                                                                  \
        if (bf16)                                                                                                      \
            add_part(rows, 1, part, inputs, row_bytes, sums, output, output_columns);                                  \
        else                                                                                                           \
            add_part(rows, 0, part, inputs, row_bytes, sums, output, output_columns);                                  \
    }
ADD(1) ADD(2) ADD(3) ADD(4)

EXPORT void NAME(adapt)(const adapter_layer *layer, const void *inputs, int64_t row_bytes, int64_t rows, int64_t bf16,
                        float *sums, float *output, int64_t output_columns)
{
    static void (*const adds[])(const adapter_part *, const char *, int64_t, int64_t, float *, float *, int64_t) = {
        add_1, add_2, add_3, add_4,
    };
    for (int64_t number = 0; number < layer->count; number++)
        adds[rows - 1](layer->parts + number, inputs, row_bytes, bf16, sums, output, output_columns);
}
