/* Products of rows of inputs with weights: one block of 64 columns at a time, and whole linear layers.
 *
 * A tile of up to 6 rows keeps its sums in registers. Each sum is one chain of multiply-adds in the order of the inputs,
 * whatever the tile and the other rows: a row has the same bits in any batch.
 *
 * Layout of a block, which `parts`, `pair` and dragoman_text's linear.py agree on:
 *   [parts, steps, 64 / parts, pair], where a step is one input, or a pair of BF16 inputs that one instruction
 *   multiplies (`pair`).
 *
 * With AMX the products of BF16 have other tiles and another order of sums: amx_product.h. */
#include "product.h"
#include "norm.h"
#include "share.h"
#if defined(FORM_amx)
#include "amx_product.h"
#endif

/* Steps along a block per turn of the tiles. For up to two tiles: few, so that the core prefetches weights while it
 * computes. For more: as many as keep the weights in the first-level cache. */
#define SHORT_TURN 16
#define LONG_TURN 256
/* Weights are fetched as many steps before they are used by a tile that reads one part of several, and as many bytes before
 * if a block has no parts: the core foresees neither well. */
#define STEPS_AHEAD 24
#define BYTES_AHEAD 4096

#if defined(FORM_avx512_bf16)
#define PAIR 2
#else
#define PAIR 1
#endif
#define BLOCK_VECTORS (COLUMNS / LANES)
#define PARTS (WIDE_REGISTERS ? 1 : BLOCK_VECTORS)

/* Weights and inputs: FP32, or BF16 that is widened, or pairs of BF16. */
enum { F32, BF16, PAIRS };

INLINE int item_bytes(int kind) { return kind == F32 ? 4 : 2; }
INLINE int pair_of(int kind) { return kind == PAIRS ? 2 : 1; }
INLINE int step_bytes(int kind) { return item_bytes(kind) * pair_of(kind); }

/* Rows of a tile: as many as fit into registers beside the weights; few in the portable form, which is to be small. */
#define TILE_ROWS (PORTABLE ? 2 : 6)

/* Vectors of columns that a tile computes at once. With 32 registers 24 sums, 4 weights and an input are in 29. Otherwise
 * a vector takes two or four of 16 registers, or of NEON's 32; widened weights need some. */
INLINE int tile_vectors(int kind, int rows)
{
    int sums = WIDE_REGISTERS ? 24 : kind == BF16 ? 4 : 6;
    return rows * 4 <= sums ? 4 : rows * 2 <= sums ? 2 : 1;
}

#if defined(FORM_avx512_bf16)
INLINE floats dot_pairs(floats a, floats b, floats c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
INLINE floats all_pairs(const char *from)
{
    int32_t pair;
    memcpy(&pair, from, 4);
    return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
}
#else
/* Never called: a constant argument chooses other loops. */
INLINE floats dot_pairs(floats a, floats b, floats c) { return (void)a, (void)b, c; }
INLINE floats all_pairs(const char *from) { return (void)from, all(0); }
#endif

INLINE floats load_weight(int kind, const char *from)
{
    return kind == BF16 ? load_bf16((const uint16_t *)from) : load((const float *)from);
}

/* The weights of a step for `vectors` vectors of columns from `first` on. */
INLINE void load_step(int kind, const char *weights, int64_t part_bytes, int64_t step, int first, int vectors,
                      floats found[BLOCK_VECTORS])
{
    const int columns = COLUMNS / PARTS, bytes = columns * step_bytes(kind);
    UNROLL for (int i = 0; PARTS == 1 && i < bytes; i += 64)
        __builtin_prefetch(weights + step * bytes + BYTES_AHEAD + i);
    UNROLL for (int i = 0; i < vectors; i++)
    {
        int number = first + i, size = BLOCK_VECTORS / PARTS;
        const char *part = weights + part_bytes * (number / size);
        if (PARTS > 1 && vectors == 1) /* the core fetches several parts at once fast enough */
            __builtin_prefetch(part + (step + STEPS_AHEAD) * bytes);
        found[i] = load_weight(kind, part + (step * columns + number % size * LANES) * step_bytes(kind));
    }
}

INLINE floats load_input(int kind, const char *from)
{
    float number;
    if (kind == PAIRS)
        return all_pairs(from);
    if (kind == BF16)
        return all_bf16((const uint16_t *)from);
    return memcpy(&number, from, 4), all(number);
}

/* Add the products of `rows` rows to their sums, for `vectors` vectors of columns from `first` on. */
INLINE void tile_columns(const int kind, const int rows, const int first, const int vectors, const char *inputs,
                         int64_t row_bytes, const char *weights, float *sums, int64_t steps, int64_t part_bytes)
{
    floats totals[6][BLOCK_VECTORS], found[BLOCK_VECTORS];
    UNROLL for (int row = 0; row < rows; row++)
    {
        UNROLL for (int i = 0; i < vectors; i++) totals[row][i] = load(sums + COLUMNS * row + LANES * (first + i));
    }
    for (int64_t step = 0; step < steps; step++) {
        load_step(kind, weights, part_bytes, step, first, vectors, found);
        UNROLL for (int row = 0; row < rows; row++)
        {
            floats input = load_input(kind, inputs + row * row_bytes + step * step_bytes(kind));
            UNROLL for (int i = 0; i < vectors; i++)
                totals[row][i] = kind == PAIRS ? dot_pairs(input, found[i], totals[row][i])
                                               : mul_add(input, found[i], totals[row][i]);
        }
    }
    UNROLL for (int row = 0; row < rows; row++)
    {
        UNROLL for (int i = 0; i < vectors; i++) store(sums + COLUMNS * row + LANES * (first + i), totals[row][i]);
    }
}

INLINE void tile(const int kind, const int rows, const char *inputs, int64_t row_bytes, const char *weights, float *sums,
                 int64_t steps, int64_t part_bytes)
{
    const int vectors = tile_vectors(kind, rows);
    UNROLL for (int first = 0; first < BLOCK_VECTORS; first += vectors)
        tile_columns(kind, rows, first, vectors, inputs, row_bytes, weights, sums, steps, part_bytes);
}

#define TILE_ARGUMENTS                                                                                                 \
    const char *inputs, int64_t row_bytes, const char *weights, float *sums, int64_t steps, int64_t part_bytes
#define TILE(kind, rows)                                                                                               \
    NOINLINE void tile_##kind##_##rows(TILE_ARGUMENTS)                                                                 \
    {                                                                                                                  \
        tile(kind, rows, inputs, row_bytes, weights, sums, steps, part_bytes);                                         \
    }
#if PORTABLE
#define TILES(kind)                                                                                                    \
    TILE(kind, 1) TILE(kind, 2)                                                                                        \
    static void (*const tiles_##kind[])(TILE_ARGUMENTS) = {tile_##kind##_1, tile_##kind##_2};
#else
#define TILES(kind)                                                                                                    \
    TILE(kind, 1) TILE(kind, 2) TILE(kind, 3) TILE(kind, 4) TILE(kind, 5) TILE(kind, 6)                                \
    static void (*const tiles_##kind[])(TILE_ARGUMENTS) = {                                                            \
        tile_##kind##_1, tile_##kind##_2, tile_##kind##_3, tile_##kind##_4, tile_##kind##_5, tile_##kind##_6,          \
    };
#endif

TILES(F32)
#if PAIR == 1
TILES(BF16)
#elif !defined(FORM_amx)
TILES(PAIRS)
#endif

INLINE void multiply_block(void (*const *tiles)(TILE_ARGUMENTS), const int kind, const char *inputs, int64_t row_bytes,
                           const char *weights, float *sums, int64_t rows, int64_t size)
{
    const int most = TILE_ROWS;
    const int64_t steps = size / pair_of(kind), weight_bytes = step_bytes(kind) * (COLUMNS / PARTS);
    const int64_t turn = rows <= most ? steps : rows <= 2 * most ? SHORT_TURN : LONG_TURN;
    for (int64_t i = 0; i < rows * COLUMNS; i += LANES)
        store(sums + i, all(0));
    for (int64_t step = 0; step < steps; step += turn) {
        int64_t count = smaller(turn, steps - step);
        for (int64_t row = 0; row < rows; row += most)
            tiles[smaller(most, rows - row) - 1](inputs + row * row_bytes + step * step_bytes(kind), row_bytes,
                                                 weights + step * weight_bytes, sums + row * COLUMNS, count,
                                                 steps * weight_bytes);
    }
}

EXPORT void NAME(product)(const void *inputs, int64_t row_bytes, const void *weights, float *sums, int64_t rows,
                          int64_t size, int64_t bf16)
{
    if (!bf16)
        multiply_block(tiles_F32, F32, inputs, row_bytes, weights, sums, rows, size);
    else
#if defined(FORM_amx)
        multiply_by_amx(inputs, row_bytes, weights, sums, rows, size);
#elif PAIR == 2
        multiply_block(tiles_PAIRS, PAIRS, inputs, row_bytes, weights, sums, rows, size);
#else
        multiply_block(tiles_BF16, BF16, inputs, row_bytes, weights, sums, rows, size);
#endif
}

EXPORT void NAME(product_part)(const linear_layer *layer, const void *inputs, int64_t row_bytes, int64_t rows,
                               int64_t part, float *sums, float *output, int64_t output_columns, int64_t add_to_output)
{
    int64_t panels = panels_of(rows), block = part / panels, first = part % panels * PANEL_ROWS;
    int64_t count = smaller(PANEL_ROWS, rows - first), column = block * COLUMNS;
    const char *weights = (const char *)layer->weights + block * layer->block_bytes;
    const float *bias = layer->bias + column;
    NAME(product)((const char *)inputs + first * row_bytes, row_bytes, weights, sums, count, layer->size, layer->bf16);
    for (int64_t row = 0; row < count; row++) {
        float *target = output + (first + row) * output_columns + column;
        for (int64_t i = 0; i < COLUMNS; i += LANES) {
            floats value = add(load(sums + row * COLUMNS + i), load(bias + i));
            store(target + i, add_to_output ? add(load(target + i), value) : value);
        }
    }
}

/* A linear layer outside of a step: output [rows, 64 * blocks]. The threads that call it share its parts. */
EXPORT void NAME(linear)(const linear_call *call, float *sums)
{
    const linear_layer *layer = call->layer;
    shared_loop *loop = call->counters;
    int64_t parts = panels_of(call->rows) * layer->blocks;
    for (int64_t part = take_part(loop); part < parts; part = next_part(loop))
        NAME(product_part)(layer, call->inputs, call->row_bytes, call->rows, part, sums, call->output,
                           layer->blocks * COLUMNS, 0);
    wait_for_parts(loop, parts);
}
