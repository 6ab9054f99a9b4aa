/* Products of rows of inputs with weights: one block of 64 columns at a time, and whole linear layers.
 *
 * A tile of up to 6 rows keeps its sums in registers. Each sum is one chain of multiply-adds in the order of the inputs
 * (by groups, if weights are quantized), whatever the tile and the other rows: a row has the same bits in any batch.
 *
 * Layout of a block, which `parts`, `pair` and dragoman_text's linear.py agree on:
 *   not quantized: [parts, steps, 64 / parts, pair], where a step is one input, or a pair of BF16 inputs that one
 *   instruction multiplies (`pair`); quantized: groups of 32 inputs, each [64] scales in BF16, then its steps. */
#include "product.h"
#include "norm.h"
#include "share.h"

/* Steps along a block per turn of the tiles. For up to two tiles: few, so that the core prefetches weights while it
 * computes. For more: as many as keep the weights in the first-level cache. */
#define SHORT_TURN 16
#define LONG_TURN 256
/* Steps by which a tile that reads one part of the columns prefetches its weights. */
#define PREFETCHED_STEPS 24

#if defined(FORM_avx512_bf16)
#define PAIR 2
#else
#define PAIR 1
#endif
#define BLOCK_VECTORS (COLUMNS / LANES)
#define PARTS (WIDE_REGISTERS ? 1 : BLOCK_VECTORS)
#define SCALE_BYTES (2 * COLUMNS)

/* Weights and inputs: FP32, or BF16 that is widened, or pairs of BF16. */
enum { F32, BF16, PAIRS };

INLINE int item_bytes(int kind) { return kind == F32 ? 4 : 2; }
INLINE int pair_of(int kind) { return kind == PAIRS ? 2 : 1; }
INLINE int step_bytes(int kind) { return item_bytes(kind) * pair_of(kind); }
INLINE int group_bytes(int bits) { return SCALE_BYTES + COLUMNS * GROUP * bits / 8; }

/* Rows of a tile: as many as fit into registers beside those that decode weights; few in the portable form, which is to be
 * small. */
INLINE int tile_rows(int kind, int bits)
{
    if (PORTABLE)
        return 2;
    return (bits == 8 && kind == PAIRS) || (bits == 4 && !WIDE_REGISTERS) ? 5 : 6;
}

/* Vectors of columns that a tile computes at once. With 32 registers 24 sums, 4 weights and an input are in 29. Otherwise
 * a vector takes two or four of 16 registers, or of NEON's 32; converted weights need some. */
INLINE int tile_vectors(int kind, int bits, int rows)
{
    int sums = WIDE_REGISTERS ? 24 : kind == BF16 || bits ? 4 : 6;
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
/* The BF16 numbers -8 to 7 by the lowest 4 bits of each 16; the instruction ignores the higher ones. */
INLINE floats look_up_int4(const char *chunk, int number)
{
    static const uint16_t table[32] = {
        0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
        0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    };
    __m512i packed = _mm512_srli_epi16(_mm512_loadu_si512(chunk), 4 * number);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(packed, _mm512_loadu_si512(table)));
}
/* Bytes of the BF16 numbers 0 to 127. */
#define OF(n, byte)                                                                                                    \
    (uint8_t)(((n) == 0   ? 0                                                                                          \
               : (n) < 2  ? 0x3f80 + ((n) - 1) * 128                                                                   \
               : (n) < 4  ? 0x4000 + ((n) - 2) * 64                                                                    \
               : (n) < 8  ? 0x4080 + ((n) - 4) * 32                                                                    \
               : (n) < 16 ? 0x4100 + ((n) - 8) * 16                                                                    \
               : (n) < 32 ? 0x4180 + ((n) - 16) * 8                                                                    \
               : (n) < 64 ? 0x4200 + ((n) - 32) * 4                                                                    \
                          : 0x4280 + ((n) - 64) * 2) >>                                                                \
              (8 * (byte)))
#define OF8(n, byte)                                                                                                   \
    OF(n, byte), OF(n + 1, byte), OF(n + 2, byte), OF(n + 3, byte), OF(n + 4, byte), OF(n + 5, byte), OF(n + 6, byte), \
        OF(n + 7, byte)
#define OF64(n, byte)                                                                                                  \
    OF8(n, byte), OF8(n + 8, byte), OF8(n + 16, byte), OF8(n + 24, byte), OF8(n + 32, byte), OF8(n + 40, byte),        \
        OF8(n + 48, byte), OF8(n + 56, byte)
static const uint8_t magnitude_bytes[2][2][64] = {{{OF64(0, 0)}, {OF64(64, 0)}}, {{OF64(0, 1)}, {OF64(64, 1)}}};

/* Two vectors of pairs from 64 bytes of sign and magnitude: both bytes of each number are looked up and joined. */
INLINE void look_up_int8(const char *chunk, floats found[2])
{
    __m512i packed = _mm512_loadu_si512(chunk);
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(magnitude_bytes[0][0]), packed,
                                           _mm512_loadu_si512(magnitude_bytes[0][1]));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(magnitude_bytes[1][0]), packed,
                                            _mm512_loadu_si512(magnitude_bytes[1][1]));
    high = _mm512_or_si512(high, _mm512_and_si512(packed, _mm512_set1_epi8((char)128)));
    found[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
    found[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
}
#else
/* Never called: a constant argument chooses other loops. */
INLINE floats dot_pairs(floats a, floats b, floats c) { return (void)a, (void)b, c; }
INLINE floats all_pairs(const char *from) { return (void)from, all(0); }
INLINE floats look_up_int4(const char *chunk, int number) { return (void)chunk, (void)number, all(0); }
INLINE void look_up_int8(const char *chunk, floats found[2]) { (void)chunk, (void)found; }
#endif

INLINE floats load_weight(int kind, const char *from)
{
    return kind == BF16 ? load_bf16((const uint16_t *)from) : load((const float *)from);
}

/* The weights of a step for `vectors` vectors of columns from `first` on; quantized ones begin with the scales. */
INLINE void load_step(int kind, int bits, const char *weights, int64_t part_bytes, int64_t step, int in_turn, int first,
                      int vectors, floats found[BLOCK_VECTORS])
{
    const char *integers = weights + SCALE_BYTES;
    if (bits == 8 && kind == PAIRS) {
        look_up_int8(integers + step * 128, found);
        look_up_int8(integers + step * 128 + 64, found + 2);
        return;
    }
    UNROLL for (int i = 0; i < vectors; i++)
    {
        int number = first + i;
        if (bits == 8) {
            found[i] = load_int8((const int8_t *)(integers + step * COLUMNS + number * LANES));
        } else if (bits == 4 && kind == PAIRS) {
            found[i] = look_up_int4(integers + step * 64, number);
        } else if (bits == 4) { /* one chunk has two steps */
            found[i] = load_int4((const uint32_t *)(integers + step / 2 * 64), number + 4 * in_turn);
        } else {
            int size = BLOCK_VECTORS / PARTS, columns = COLUMNS / PARTS;
            const char *part = weights + part_bytes * (number / size);
            if (vectors == 1) /* the core prefetches several parts at once fast enough, but not a single one */
                __builtin_prefetch(part + (step + PREFETCHED_STEPS) * (columns * step_bytes(kind)));
            found[i] = load_weight(kind, part + (step * columns + number % size * LANES) * step_bytes(kind));
        }
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
INLINE void tile_columns(const int kind, const int bits, const int rows, const int first, const int vectors,
                         const char *inputs, int64_t row_bytes, const char *weights, float *sums, int64_t steps,
                         int64_t part_bytes)
{
    floats totals[6][BLOCK_VECTORS], found[BLOCK_VECTORS];
    const int turn = bits == 4 && kind != PAIRS ? 2 : 1;
    UNROLL for (int row = 0; row < rows; row++)
    {
        UNROLL for (int i = 0; i < vectors; i++)
            totals[row][i] = bits ? all(0) : load(sums + COLUMNS * row + LANES * (first + i));
    }
    for (int64_t step = 0; step < steps; step += turn) {
        UNROLL for (int in_turn = 0; in_turn < turn; in_turn++)
        {
            load_step(kind, bits, weights, part_bytes, step, in_turn, first, vectors, found);
            UNROLL for (int row = 0; row < rows; row++)
            {
                floats input = load_input(kind, inputs + row * row_bytes + (step + in_turn) * step_bytes(kind));
                UNROLL for (int i = 0; i < vectors; i++)
                    totals[row][i] = kind == PAIRS ? dot_pairs(input, found[i], totals[row][i])
                                                   : mul_add(input, found[i], totals[row][i]);
            }
        }
    }
    UNROLL for (int i = 0; i < vectors; i++)
    {
        floats scales = bits ? load_bf16((const uint16_t *)weights + LANES * (first + i)) : all(1);
        UNROLL for (int row = 0; row < rows; row++)
        {
            float *target = sums + COLUMNS * row + LANES * (first + i);
            store(target, bits ? mul_add(totals[row][i], scales, load(target)) : totals[row][i]);
        }
    }
}

/* Quantized weights are those of one group. */
INLINE void tile(const int kind, const int bits, const int rows, const char *inputs, int64_t row_bytes,
                 const char *weights, float *sums, int64_t steps, int64_t part_bytes)
{
    const int vectors = tile_vectors(kind, bits, rows);
    UNROLL for (int first = 0; first < BLOCK_VECTORS; first += vectors)
        tile_columns(kind, bits, rows, first, vectors, inputs, row_bytes, weights, sums, steps, part_bytes);
}

#define TILE_ARGUMENTS                                                                                                 \
    const char *inputs, int64_t row_bytes, const char *weights, float *sums, int64_t steps, int64_t part_bytes
#define TILE(kind, bits, rows)                                                                                         \
    NOINLINE void tile_##kind##_##bits##_##rows(TILE_ARGUMENTS)                                                        \
    {                                                                                                                  \
        tile(kind, bits, rows, inputs, row_bytes, weights, sums, steps, part_bytes);                                   \
    }
#if PORTABLE
#define TILES(kind, bits)                                                                                              \
    TILE(kind, bits, 1) TILE(kind, bits, 2)                                                                            \
    static void (*const tiles_##kind##_##bits[])(TILE_ARGUMENTS) = {tile_##kind##_##bits##_1, tile_##kind##_##bits##_2};
#else
#define TILES(kind, bits)                                                                                              \
    TILE(kind, bits, 1) TILE(kind, bits, 2) TILE(kind, bits, 3) TILE(kind, bits, 4) TILE(kind, bits, 5)                \
    TILE(kind, bits, 6)                                                                                                \
    static void (*const tiles_##kind##_##bits[])(TILE_ARGUMENTS) = {                                                   \
        tile_##kind##_##bits##_1, tile_##kind##_##bits##_2, tile_##kind##_##bits##_3,                                  \
        tile_##kind##_##bits##_4, tile_##kind##_##bits##_5, tile_##kind##_##bits##_6,                                  \
    };
#endif

TILES(F32, 0)
TILES(F32, 8)
TILES(F32, 4)
#if PAIR == 2
TILES(PAIRS, 0)
TILES(PAIRS, 8)
TILES(PAIRS, 4)
#else
TILES(BF16, 0)
TILES(BF16, 8)
TILES(BF16, 4)
#endif

INLINE void multiply_block(void (*const *tiles)(TILE_ARGUMENTS), const int kind, const int bits, const char *inputs,
                           int64_t row_bytes, const char *weights, float *sums, int64_t rows, int64_t size)
{
    const int most = tile_rows(kind, bits);
    const int64_t steps = size / pair_of(kind), group_steps = GROUP / pair_of(kind);
    int64_t turn = rows <= most ? steps : rows <= 2 * most ? SHORT_TURN : LONG_TURN;
    int64_t weight_bytes = step_bytes(kind) * (COLUMNS / PARTS);
    if (bits)
        turn = group_steps, weight_bytes = group_bytes(bits) / group_steps;
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
                          int64_t size, int64_t bf16, int64_t bits)
{
#define MULTIPLY(kind, bits)                                                                                           \
    multiply_block(tiles_##kind##_##bits, kind, bits, inputs, row_bytes, weights, sums, rows, size)
#if PAIR == 2
#define MULTIPLY_BF16(bits) MULTIPLY(PAIRS, bits)
#else
#define MULTIPLY_BF16(bits) MULTIPLY(BF16, bits)
#endif
    if (bits == 8)
        bf16 ? MULTIPLY_BF16(8) : MULTIPLY(F32, 8);
    else if (bits == 4)
        bf16 ? MULTIPLY_BF16(4) : MULTIPLY(F32, 4);
    else
        bf16 ? MULTIPLY_BF16(0) : MULTIPLY(F32, 0);
}

EXPORT void NAME(product_part)(const linear_layer *layer, const void *inputs, int64_t row_bytes, int64_t rows,
                               int64_t part, float *sums, float *output, int64_t output_columns, int64_t add_to_output)
{
    int64_t panels = panels_of(rows), block = part / panels, first = part % panels * PANEL_ROWS;
    int64_t count = smaller(PANEL_ROWS, rows - first), column = block * COLUMNS;
    const char *weights = (const char *)layer->weights + block * layer->block_bytes;
    const float *bias = layer->bias + column;
    NAME(product)((const char *)inputs + first * row_bytes, row_bytes, weights, sums, count, layer->size, layer->bf16,
                  layer->bits);
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
