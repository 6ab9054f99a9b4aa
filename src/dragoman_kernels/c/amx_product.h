/* The product of BF16 inputs with one block of 64 columns of BF16 weights, by the tile registers of AMX.
 *
 * A register has 16 rows of 64 bytes: sums [rows, 16] in FP32, inputs [rows, 32], or weights of 16 columns as they are in a
 * block: 16 pairs of inputs. An instruction adds the products of 32 inputs to a sum: those of the even and of the odd
 * inputs in one chain each, from 0 on and with subnormal numbers taken as 0, then the sum of both chains. So the order
 * of a sum is that of 32 inputs after 32, whatever the number of rows. Behind the last input are zeros. */
#ifndef DRAGOMAN_AMX_PRODUCT_H
#define DRAGOMAN_AMX_PRODUCT_H

#include "amx.h"
#include "product.h"

/* Of the weights of a pair of inputs, and of the sums of a row. */
#define COLUMN_BYTES (4 * COLUMNS)
#define TILE_INPUTS 32
#define TILE_BYTES (TILE_INPUTS / 2 * COLUMN_BYTES)
/* Rows that do not fit into one register take turns with the weights of as many tiles, in the first-level cache. */
#define TILES_OF_TURN 8
/* Weights are fetched as many tiles before they are used. */
#define TILES_AHEAD 2

/* Registers: sums in 0 to 3, inputs in 4, weights in 5 to 7. */
INLINE void configure_product(int rows)
{
    const tile_shape few = {rows, 64}, all = {REGISTER_ROWS, 64}, shapes[8] = {few, few, few, few, few, all, all, all};
    configure_tiles(shapes);
}

/* Add the products of 32 inputs to the sums. */
INLINE void add_tile(const void *inputs, int64_t row_bytes, const char *weights)
{
    _tile_loadd(4, inputs, row_bytes);
    _tile_loadd(5, weights, COLUMN_BYTES);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weights + 64, COLUMN_BYTES);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weights + 128, COLUMN_BYTES);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weights + 192, COLUMN_BYTES);
    _tile_dpbf16ps(3, 4, 5);
}

/* The weights of `inputs` inputs, for tiles of `rows` rows. */
typedef struct {
    int64_t row_bytes;
    const char *weights;
    int64_t inputs, rows;
} tile_call;

/* As `add_tile` for the last inputs, less than 32. */
NOINLINE void add_partial_tile(const tile_call *call, const char *inputs, const char *weights, int64_t count)
{
    char padded_inputs[REGISTER_ROWS][2 * TILE_INPUTS] = {{0}}, padded_weights[TILE_BYTES] = {0};
    for (int64_t row = 0; row < call->rows; row++)
        memcpy(padded_inputs[row], inputs + row * call->row_bytes, (size_t)count * 2);
    memcpy(padded_weights, weights, (size_t)count / 2 * COLUMN_BYTES);
    __asm__ volatile("" : : : "memory"); /* gcc does not know that the instructions read memory */
    add_tile(padded_inputs, 2 * TILE_INPUTS, padded_weights);
}

/* Add the products of a tile of rows to their sums [rows, 64], or set these if `set`. fetch: weights of tiles ahead. */
INLINE void multiply_tile(const tile_call *call, const char *inputs, float *sums, int set, int fetch)
{
    const char *weights = call->weights;
    if (set) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, COLUMN_BYTES);
        _tile_loadd(1, sums + 16, COLUMN_BYTES);
        _tile_loadd(2, sums + 32, COLUMN_BYTES);
        _tile_loadd(3, sums + 48, COLUMN_BYTES);
    }
    for (int64_t i = 0; i < call->inputs / TILE_INPUTS; i++) {
        for (int64_t line = 0; fetch && line < TILE_BYTES; line += 64)
            __builtin_prefetch(weights + TILES_AHEAD * TILE_BYTES + line);
        add_tile(inputs, call->row_bytes, weights);
        inputs += 2 * TILE_INPUTS, weights += TILE_BYTES;
    }
    if (call->inputs % TILE_INPUTS)
        add_partial_tile(call, inputs, weights, call->inputs % TILE_INPUTS);
    _tile_stored(0, sums, COLUMN_BYTES);
    _tile_stored(1, sums + 16, COLUMN_BYTES);
    _tile_stored(2, sums + 32, COLUMN_BYTES);
    _tile_stored(3, sums + 48, COLUMN_BYTES);
}

/* Set sums [rows, 64] to the products of inputs [rows, size]: first of full tiles of 16 rows, then of the other rows. */
static void multiply_by_amx(const char *inputs, int64_t row_bytes, const char *weights, float *sums, int64_t rows,
                            int64_t size)
{
    while (rows > 0) {
        const int64_t height = smaller(rows, REGISTER_ROWS), count = rows / height * height;
        const int64_t turn = count > height ? TILES_OF_TURN * TILE_INPUTS : size;
        configure_product((int)height);
        for (int64_t first = 0; first < size; first += turn) {
            const tile_call call = {row_bytes, weights + first / 2 * COLUMN_BYTES, smaller(turn, size - first), height};
            for (int64_t row = 0; row < count; row += height)
                multiply_tile(&call, inputs + row * row_bytes + 2 * first, sums + row * COLUMNS, first == 0, row == 0);
        }
        inputs += count * row_bytes, sums += count * COLUMNS, rows -= count;
    }
    _tile_release();
}

#endif
