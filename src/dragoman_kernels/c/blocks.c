/* Products of activations with weights in blocks, as a GGUF file has them.
 *
 * A row of weights has all inputs of one output. Blocks of 32 or 256 inputs have integers of 4 to 8 bits and scales
 * (ggml-common.h of https://github.com/ggml-org/ggml defines them). Activations are rounded to integers of 8 bits with
 * one scale for each 32: x is about scale * value, scale = max |x| / 127. The sum of a group of 32 is then an exact
 * integer, so that these formulas define every bit of a result, in all forms, with FP32 operations in this order:
 *
 *     total += (float)(sum of (weight - offset) * value) * (weight scale * scale)
 *     total += minimum * (scale * (float)(sum of values))     for types that have minima
 *
 * group by group from the first input on (Q6_K has two weight scales in a group: its first line is done for each 16).
 * Weights in F32, F16 and BF16 are multiplied with the activations in FP32, `mul_add` input by input.
 *
 * A tile decodes a group of TILE rows, one in each lane, to registers, and multiplies it with all rows of activations. */
#include "product.h"
#include "norm.h"
#include "share.h"
#if defined(FORM_amx)
#include "amx.h"
#endif

#if WIDE_REGISTERS
#define TILE 16
#define X86(operation) _mm512_##operation
typedef __m512i register_bits;
#elif defined(FORM_avx2)
#define TILE 8
#define X86(operation) _mm256_##operation
typedef __m256i register_bits;
#else
#define TILE 4
#endif
#define SUPER 256       /* inputs of a block of the types that end in K */

typedef uint32_t words __attribute__((vector_size(4 * TILE)));
typedef int32_t integers __attribute__((vector_size(4 * TILE)));
typedef float numbers __attribute__((vector_size(4 * TILE)));

/* Numbers of types in the file, and of two of our own for weights (integer - zero point) * scale with unsigned integers:
 * a block of 32 has its scale in FP16, its zero point in a byte, and integers as Q4_0 or Q8_0 has them. */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };
enum { Q4_Z = 256, Q8_Z = 257 };

/* Rows of weights of the lanes: the last ones repeat a row if there are fewer. */
typedef struct {
    const uint8_t *base;
    int32_t offsets[TILE];
    int64_t row_bytes;
} tile;

/* Rows `first` to `first + count` of all activations. */
typedef struct {
    const int8_t *values;
    const float *scales;
    const int32_t *sums;
    const float *floats;
    int64_t all_rows, first, count;
} panel;

/* ------------------------------------------------------------------------------------------- operations of a form */

INLINE numbers to_numbers(integers a) { return __builtin_convertvector(a, numbers); }
INLINE numbers all_numbers(float number) { return number - (numbers){0}; }

INLINE numbers fma_numbers(numbers a, numbers b, numbers c)
{
#if WIDE_REGISTERS
    return (numbers)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(FORM_avx2)
    return (numbers)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(FORM_neon)
    return (numbers)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* The numbers in FP16 in the lower 16 bits of each lane; the higher bits are ignored. */
INLINE numbers from_f16(words a)
{
#if WIDE_REGISTERS
    return (numbers)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)a));
#elif defined(FORM_avx2)
    __m256i halves = (__m256i)(a & 0xffff);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0xd8);
    return (numbers)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
#else
    /* As widen_f16 of vectors.h. */
    words sign = (a & 0x8000) << 16, rest = a & 0x7fff;
    words scaled = (words)((numbers)(rest << 13) * all_numbers(bits_to_float(0x77800000)));
    words special = (words)(rest >= 0x7c00);
    return (numbers)(sign | (special & (0x7f800000 | (rest & 0x3ff) << 13)) | (~special & scaled));
#endif
}

/* Four bytes of each row. */
INLINE words gather(const tile *of, int64_t offset)
{
#if WIDE_REGISTERS
    return (words)_mm512_i32gather_epi32(_mm512_loadu_si512(of->offsets), of->base + offset, 1);
#elif defined(FORM_avx2)
    __m256i offsets = _mm256_loadu_si256((const __m256i *)of->offsets);
    return (words)_mm256_i32gather_epi32((const int *)(const void *)(of->base + offset), offsets, 1);
#else
    uint32_t lanes[TILE];
    UNROLL for (int i = 0; i < TILE; i++) memcpy(lanes + i, of->base + of->offsets[i] + offset, 4);
    words result;
    memcpy(&result, lanes, sizeof result);
    return result;
#endif
}

/* Sixteen bytes of each row, as four vectors of four bytes of each. */
INLINE void gather_16(const tile *of, int64_t offset, words result[4])
{
    const uint8_t *base = of->base + offset;
    const int32_t *at = of->offsets;
#if WIDE_REGISTERS
#define ROW(i) _mm_loadu_si128((const __m128i *)(const void *)(base + at[i]))
    __m512i quarters[4], pairs[4];
    UNROLL for (int i = 0; i < 4; i++)
    {
        quarters[i] = _mm512_inserti32x4(_mm512_castsi128_si512(ROW(i)), ROW(4 + i), 1);
        quarters[i] = _mm512_inserti32x4(quarters[i], ROW(8 + i), 2);
        quarters[i] = _mm512_inserti32x4(quarters[i], ROW(12 + i), 3);
    }
    pairs[0] = _mm512_unpacklo_epi32(quarters[0], quarters[1]), pairs[1] = _mm512_unpackhi_epi32(quarters[0], quarters[1]);
    pairs[2] = _mm512_unpacklo_epi32(quarters[2], quarters[3]), pairs[3] = _mm512_unpackhi_epi32(quarters[2], quarters[3]);
    result[0] = (words)_mm512_unpacklo_epi64(pairs[0], pairs[2]), result[1] = (words)_mm512_unpackhi_epi64(pairs[0], pairs[2]);
    result[2] = (words)_mm512_unpacklo_epi64(pairs[1], pairs[3]), result[3] = (words)_mm512_unpackhi_epi64(pairs[1], pairs[3]);
#undef ROW
#elif defined(FORM_avx2)
#define ROW(i) _mm_loadu_si128((const __m128i *)(const void *)(base + at[i]))
    __m256i halves[4], pairs[4];
    UNROLL for (int i = 0; i < 4; i++) halves[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(ROW(i)), ROW(4 + i), 1);
    pairs[0] = _mm256_unpacklo_epi32(halves[0], halves[1]), pairs[1] = _mm256_unpackhi_epi32(halves[0], halves[1]);
    pairs[2] = _mm256_unpacklo_epi32(halves[2], halves[3]), pairs[3] = _mm256_unpackhi_epi32(halves[2], halves[3]);
    result[0] = (words)_mm256_unpacklo_epi64(pairs[0], pairs[2]), result[1] = (words)_mm256_unpackhi_epi64(pairs[0], pairs[2]);
    result[2] = (words)_mm256_unpacklo_epi64(pairs[1], pairs[3]), result[3] = (words)_mm256_unpackhi_epi64(pairs[1], pairs[3]);
#undef ROW
#else
    uint32_t rows[TILE][4];
    UNROLL for (int i = 0; i < TILE; i++) memcpy(rows[i], base + at[i], 16);
    UNROLL for (int i = 0; i < 4; i++) result[i] = (words){rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
#endif
}

/* Bytes of weights: unsigned and less than 128, so that the sum of two products fits into 16 bits; unsigned; signed. */
enum { SMALL_BYTES, BYTES, SIGNED_BYTES };

/* Whether `dot` takes signed weights. Otherwise 128 is added to them, which an offset takes away again. */
#if defined(X86) && !defined(FORM_avx512_bf16)
#define TAKES_SIGNED 1
#else
#define TAKES_SIGNED 0
#endif

/* Add to each lane the products of its four bytes with four signed ones, none of which is -128. */
INLINE integers dot(integers sums, words weights, const int8_t *values, int kind)
{
    int32_t four;
    memcpy(&four, values, 4);
#if defined(FORM_avx512_bf16)
    (void)kind;
    return (integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(X86)
    register_bits bytes = (register_bits)weights, factors = X86(set1_epi32)(four);
    if (kind == BYTES) {
        register_bits even = X86(srai_epi16)(X86(slli_epi16)(factors, 8), 8), odd = X86(srai_epi16)(factors, 8);
        sums += (integers)X86(madd_epi16)((register_bits)(weights & 0xff00ff), even);
        return sums + (integers)X86(madd_epi16)((register_bits)(weights >> 8 & 0xff00ff), odd);
    }
    if (kind == SIGNED_BYTES) { /* the factors take the signs: a sum of two products is at most 2 * 128 * 127 */
#if WIDE_REGISTERS
        factors = _mm512_mask_sub_epi8(factors, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), factors);
#else
        factors = _mm256_sign_epi8(factors, bytes);
#endif
        bytes = X86(abs_epi8)(bytes);
    }
    return sums + (integers)X86(madd_epi16)(X86(maddubs_epi16)(bytes, factors), X86(set1_epi16)(1));
#else
    (void)kind, (void)four;
    UNROLL for (int i = 0; i < 4; i++) sums += (integers)(weights >> 8 * i & 255) * (int32_t)values[i];
    return sums;
#endif
}

/* Fetch `bytes` of each row of the next tile, which begins where this one ends, while this one computes those at `begin`: a
 * CPU does not foresee what so many rows read in turns. Beyond the end of the weights it does nothing. */
INLINE void fetch_next(const tile *of, int64_t begin, int64_t bytes)
{
    const uint8_t *next = of->base + TILE * (of->row_bytes + begin);
    for (int64_t i = 0; i < TILE * bytes; i += 64)
        __builtin_prefetch(next + i);
}

/* ------------------------------------------------------------------------------------------------ products of a group */

/* What all rows of a group share: its integers, by four inputs, and what is to be done with their sums. */
typedef struct {
    words weights[8];
    numbers scale, second_scale, minimum;
} group;

/* Add the sums of a group to a row's total. halves: those of the second 16 inputs are `high` and have `second_scale`.
 * sum: that of the row's values times `scale`. */
INLINE numbers add_group(numbers total, const group *g, integers low, integers high, float scale, float sum, int halves,
                         int minima)
{
    if (halves) {
        total += to_numbers(low) * (g->scale * all_numbers(scale));
        total += to_numbers(high) * (g->second_scale * all_numbers(scale));
    } else
        total += to_numbers(low + high) * (g->scale * all_numbers(scale));
    return minima ? total + g->minimum * all_numbers(sum) : total;
}

#if defined(FORM_amx)
/* From this many rows on, tile registers compute the sums of groups, which are the same: exact integers. With halves it
 * would gain nothing. */
#define LEAST_TILE_ROWS 24

/* Registers: sums in 0 and 1, inputs in 2 and 3, by turns; weights in 4. The sums and inputs of the last rows, fewer than
 * 16, are in registers of their own: 6 and 7. */
INLINE void configure_groups(int64_t rows)
{
    const int last = rows % REGISTER_ROWS ? (int)(rows % REGISTER_ROWS) : 1;
    const tile_shape sums = {REGISTER_ROWS, 64}, inputs = {REGISTER_ROWS, GROUP}, weights = {GROUP / 4, 64};
    const tile_shape shapes[8] = {sums, sums, inputs, inputs, weights, weights, {last, 64}, {last, GROUP}};
    configure_tiles(shapes);
}

/* An offset makes weights signed. */
#define MULTIPLY_TILE(sums, inputs, from, to)                                                                          \
    do {                                                                                                               \
        _tile_loadd(inputs, from, GROUP);                                                                              \
        _tile_zero(sums);                                                                                              \
        if (offset)                                                                                                    \
            _tile_dpbssd(sums, inputs, 4);                                                                             \
        else                                                                                                           \
            _tile_dpbsud(sums, inputs, 4);                                                                             \
        _tile_stored(sums, to, 64);                                                                                    \
    } while (0)

/* Compute the sums of a group for all rows. values: of the first row. */
INLINE void multiply_tiles(const int8_t *values, int64_t rows, const group *g, int32_t offset, integers *sums)
{
    register_bits weights[8];
    UNROLL for (int i = 0; i < 8; i++)
        weights[i] = _mm512_sub_epi8((register_bits)g->weights[i], _mm512_set1_epi8((char)offset));
    __asm__ volatile("" : : : "memory"); /* gcc does not know that the instructions read memory */
    _tile_loadd(4, weights, 64);
    for (; rows >= 2 * REGISTER_ROWS; rows -= 2 * REGISTER_ROWS) {
        MULTIPLY_TILE(0, 2, values, sums);
        MULTIPLY_TILE(1, 3, values + REGISTER_ROWS * GROUP, sums + REGISTER_ROWS);
        values += 2 * REGISTER_ROWS * GROUP, sums += 2 * REGISTER_ROWS;
    }
    if (rows >= REGISTER_ROWS) {
        MULTIPLY_TILE(0, 2, values, sums);
        rows -= REGISTER_ROWS, values += REGISTER_ROWS * GROUP, sums += REGISTER_ROWS;
    }
    if (rows)
        MULTIPLY_TILE(6, 7, values, sums);
}
#endif

/* Add a group to the totals. kind, halves: as in `dot` and `add_group`. */
INLINE void multiply(const panel *of, int64_t number, const group *g, int32_t offset, int kind, int halves, int minima,
                     numbers *totals)
{
    int64_t first = number * of->all_rows + of->first;
    const int8_t *values = of->values + first * GROUP;
    const float *scales = of->scales + first;
    const int32_t *sums = of->sums + 2 * first;
    float scaled[PANEL_ROWS];
    for (int64_t row = 0; minima && row < of->count; row++)
        scaled[row] = scales[row] * (float)(sums[2 * row] + sums[2 * row + 1]);
#if defined(FORM_amx)
    if (of->count >= LEAST_TILE_ROWS && !halves) {
        integers found[PANEL_ROWS];
        multiply_tiles(values, of->count, g, offset, found);
        for (int64_t row = 0; row < of->count; row++)
            totals[row] = add_group(totals[row], g, found[row], (integers){0}, scales[row], minima ? scaled[row] : 0, 0,
                                    minima);
        return;
    }
#endif
    for (int64_t row = 0; row < of->count; row++, values += GROUP, sums += 2) {
        integers low = (integers){0} - offset * sums[0], high = (integers){0} - offset * sums[1];
        UNROLL for (int i = 0; i < 4; i++)
        {
            low = dot(low, g->weights[i], values + 4 * i, kind);
            high = dot(high, g->weights[4 + i], values + 16 + 4 * i, kind);
        }
        totals[row] = add_group(totals[row], g, low, high, scales[row], minima ? scaled[row] : 0, halves, minima);
    }
}

INLINE void multiply_floats(const panel *of, int64_t number, int64_t input, const numbers weights[8], numbers *totals)
{
    const float *values = of->floats + (number * of->all_rows + of->first) * GROUP + input;
    for (int64_t row = 0; row < of->count; row++, values += GROUP) {
        numbers total = totals[row];
        UNROLL for (int i = 0; i < 8; i++) total = fma_numbers(weights[i], all_numbers(values[i]), total);
        totals[row] = total;
    }
}

/* ------------------------------------------------------------------------------------------------------ types */

/* The upper bits of 4 inputs in bits 4 * step on, as bit 4 of four bytes. */
INLINE words upper_bits(words bits, int step) { return ((bits >> 4 * step & 15) * 0x204081 & 0x1010101) << 4; }

INLINE void product_floats(int type, const tile *of, const panel *in, int64_t inputs, numbers *totals)
{
    int64_t bytes = type == F32 ? 4 : 2;
    for (int64_t input = 0; input < inputs; input += 8) {
        words raw[8];
        numbers weights[8];
        gather_16(of, input * bytes, raw);
        if (type == F32)
            gather_16(of, input * bytes + 16, raw + 4);
        UNROLL for (int i = 0; i < 8; i++)
        {
            if (type == F32)
                weights[i] = (numbers)raw[i];
            else if (type == BF16)
                weights[i] = (numbers)(i % 2 ? raw[i / 2] & 0xffff0000 : raw[i / 2] << 16);
            else
                weights[i] = from_f16(raw[i / 2] >> 16 * (i % 2));
        }
        multiply_floats(in, input / GROUP, input % GROUP, weights, totals);
    }
}

/* Blocks of 32 inputs. */
INLINE void product_32(int type, const tile *of, const panel *in, int64_t inputs, numbers *totals)
{
    int zeros = type == Q4_Z || type == Q8_Z, minima = type == Q4_1 || type == Q5_1 || zeros;
    int five = type == Q5_0 || type == Q5_1, eight = type == Q8_0 || type == Q8_Z;
    int64_t bits_at = zeros ? 3 : minima ? 4 : 2, integers_at = bits_at + 4 * five;
    int64_t bytes = integers_at + (eight ? 32 : 16);
    int takes_signed = TAKES_SIGNED && type == Q8_0;
    int32_t offset = minima || takes_signed ? 0 : eight ? 128 : five ? 16 : 8;
    uint32_t sign = type == Q8_0 && !takes_signed ? 0x80808080 : 0;
    for (int64_t number = 0; number < inputs / GROUP; number++) {
        int64_t begin = number * bytes;
        group g;
        fetch_next(of, begin, bytes);
        words head = gather(of, begin), raw[4], bits = head;
        g.scale = g.second_scale = from_f16(head);
        g.minimum = zeros ? g.scale * to_numbers(-(integers)(head >> 16 & 255)) : minima ? from_f16(head >> 16) : g.scale;
        if (five)
            bits = gather(of, begin + bits_at);
        gather_16(of, begin + integers_at, raw);
        if (eight) {
            words more[4];
            gather_16(of, begin + integers_at + 16, more);
            UNROLL for (int i = 0; i < 4; i++) g.weights[i] = raw[i] ^ sign, g.weights[4 + i] = more[i] ^ sign;
        } else {
            UNROLL for (int i = 0; i < 4; i++) g.weights[i] = raw[i] & 0xf0f0f0f, g.weights[4 + i] = raw[i] >> 4 & 0xf0f0f0f;
        }
        if (five)
            UNROLL for (int i = 0; i < 8; i++) g.weights[i] |= upper_bits(bits, i);
        multiply(in, number, &g, offset, takes_signed ? SIGNED_BYTES : eight ? BYTES : SMALL_BYTES, 0, minima, totals);
    }
}

/* Q4_K and Q5_K: a block has scales and minima of 6 bits for its 8 groups, in 12 bytes. */
INLINE void product_k(int type, const tile *of, const panel *in, int64_t inputs, numbers *totals)
{
    int five = type == Q5_K;
    int64_t bytes = five ? 176 : 144;
    for (int64_t block = 0; block < inputs / SUPER; block++) {
        int64_t begin = block * bytes;
        words head = gather(of, begin), a = gather(of, begin + 4), b = gather(of, begin + 8), c = gather(of, begin + 12);
        numbers scale = from_f16(head), minimum = -from_f16(head >> 16);
        /* Of four groups in the bytes of a lane; the others have their two highest bits in those of the first. */
        words scales[2] = {a & 0x3f3f3f3f, (c & 0xf0f0f0f) | (a >> 2 & 0x30303030)};
        words minima[2] = {b & 0x3f3f3f3f, (c >> 4 & 0xf0f0f0f) | (b >> 2 & 0x30303030)};
        for (int number = 0; number < 8; number++) {
            group g;
            int shift = number % 4 * 8;
            g.scale = g.second_scale = scale * to_numbers((integers)(scales[number / 4] >> shift & 255));
            g.minimum = minimum * to_numbers((integers)(minima[number / 4] >> shift & 255));
            int64_t integers_at = begin + (five ? 48 : 16) + number / 2 * 32;
            gather_16(of, integers_at, g.weights), gather_16(of, integers_at + 16, g.weights + 4);
            UNROLL for (int i = 0; i < 8; i++) g.weights[i] = g.weights[i] >> number % 2 * 4 & 0xf0f0f0f;
            if (five) {
                words bits[8];
                gather_16(of, begin + 16, bits), gather_16(of, begin + 32, bits + 4);
                UNROLL for (int i = 0; i < 8; i++) g.weights[i] |= (bits[i] >> number & 0x1010101) << 4;
            }
            multiply(in, block * 8 + number, &g, 0, SMALL_BYTES, 0, 1, totals);
        }
    }
}

/* A block has 16 scales of 8 bits; groups 4 n to 4 n + 3 share bytes of their lower and of their upper bits. */
INLINE void product_q6_k(const tile *of, const panel *in, int64_t inputs, numbers *totals)
{
    for (int64_t block = 0; block < inputs / SUPER; block++) {
        int64_t begin = block * 210;
        numbers scale = from_f16(gather(of, begin + 206) >> 16);
        for (int number = 0; number < 8; number++) {
            group g;
            int half = number / 4, quarter = number % 4;
            words two = gather(of, begin + 192 + 2 * number), bits[8];
            g.scale = scale * to_numbers((integers)(two << 24) >> 24);
            g.second_scale = scale * to_numbers((integers)(two << 16) >> 24);
            g.minimum = g.scale;
            int64_t lower = begin + 64 * half + 32 * (quarter % 2), upper = begin + 128 + 32 * half;
            gather_16(of, lower, g.weights), gather_16(of, lower + 16, g.weights + 4);
            gather_16(of, upper, bits), gather_16(of, upper + 16, bits + 4);
            UNROLL for (int i = 0; i < 8; i++)
            {
                words low = g.weights[i] >> quarter / 2 * 4 & 0xf0f0f0f;
                g.weights[i] = low | (bits[i] >> 2 * quarter & 0x3030303) << 4;
            }
            multiply(in, block * 8 + number, &g, 32, SMALL_BYTES, 1, 0, totals);
        }
    }
}

NOINLINE void product(int64_t type, const tile *of, const panel *in, int64_t inputs, numbers *totals)
{
    switch (type) {
    case F32: product_floats(F32, of, in, inputs, totals); break;
    case F16: product_floats(F16, of, in, inputs, totals); break;
    case BF16: product_floats(BF16, of, in, inputs, totals); break;
    case Q4_0: product_32(Q4_0, of, in, inputs, totals); break;
    case Q4_1: product_32(Q4_1, of, in, inputs, totals); break;
    case Q5_0: product_32(Q5_0, of, in, inputs, totals); break;
    case Q5_1: product_32(Q5_1, of, in, inputs, totals); break;
    case Q8_0: product_32(Q8_0, of, in, inputs, totals); break;
    case Q4_Z: product_32(Q4_Z, of, in, inputs, totals); break;
    case Q8_Z: product_32(Q8_Z, of, in, inputs, totals); break;
    case Q4_K: product_k(Q4_K, of, in, inputs, totals); break;
    case Q5_K: product_k(Q5_K, of, in, inputs, totals); break;
    case Q6_K: product_q6_k(of, in, inputs, totals); break;
    }
}

/* ------------------------------------------------------------------------------------------------ whole products */

/* The largest magnitude of 32 numbers, NaN if one is not finite. */
INLINE float largest_magnitude(const float *from)
{
    floats a = load(from), b = load(from + LANES), zero = all(0);
    floats largest = max_of(max_of(a, sub(zero, a)), max_of(b, sub(zero, b)));
    float poison = lane_sum(add(mul(a, zero), mul(b, zero)));
    return lane_max(largest) + poison; /* if a lane is NaN, so is poison */
}

/* Round 32 activations: values, their scale, the sums of the first and the last 16 values. */
INLINE void quantize(const float *from, int8_t *values, float *scale, int32_t *sums)
{
    float largest = largest_magnitude(from);
    int32_t rounded[GROUP];
    /* Numbers below have a reciprocal that is not finite. */
    float factor = largest > 1e-30f ? 127.0f / largest : 0;
    *scale = largest > 1e-30f || largest != largest ? largest / 127.0f : 0;
    for (int i = 0; i < GROUP; i += LANES) {
        floats shifted = add(mul(load(from + i), all(factor)), all(12582912.0f)); /* 1.5 * 2^23: the integer is in the low bits */
        store((float *)(void *)(rounded + i), shifted);
    }
    sums[0] = sums[1] = 0;
    for (int i = 0; i < GROUP; i++)
        values[i] = (int8_t)rounded[i];
    for (int i = 0; i < GROUP / 2; i++)
        sums[0] += values[i], sums[1] += values[GROUP / 2 + i];
}

EXPORT void NAME(blocks_read)(const block_layer *layer, const void *inputs, int64_t bf16, int64_t rows, int64_t row,
                              const block_inputs *memory)
{
    for (int64_t i = 0; i < layer->size / GROUP; i++) {
        int64_t at = i * rows + row;
        float group[GROUP];
        for (int64_t j = 0; j < GROUP; j += layer->order ? 1 : LANES) {
            if (!layer->order)
                store(group + j, load_items(inputs, i * GROUP + j, (int)bf16));
            else if (bf16)
                group[j] = bits_to_float((uint32_t)((const uint16_t *)inputs)[layer->order[i * GROUP + j]] << 16);
            else
                group[j] = ((const float *)inputs)[layer->order[i * GROUP + j]];
        }
        if (layer->rounds)
            quantize(group, memory->values + at * GROUP, memory->scales + at, memory->sums + 2 * at);
        if (layer->floats)
            memcpy(memory->floats + at * GROUP, group, sizeof group);
    }
}

static void write(const block_layer *layer, const segment *of, int64_t first, int64_t count, const panel *in,
                  const numbers *totals, float *output, int64_t output_floats, int add_to_output)
{
    for (int64_t row = 0; row < in->count; row++) {
        float *results = output + (in->first + row) * output_floats + of->first;
        if (count == TILE && !of->head) {
            numbers result = totals[row], other;
            if (layer->bias)
                memcpy(&other, layer->bias + of->first + first, sizeof other), result += other;
            if (add_to_output)
                memcpy(&other, results + first, sizeof other), result += other;
            memcpy(results + first, &result, sizeof result);
            continue;
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t to = first + i;
            if (of->head) {
                int64_t in_head = to % of->head;
                to += in_head / 2 + in_head % 2 * (of->head / 2) - in_head;
            }
            float result = ((const float *)(totals + row))[i];
            if (layer->bias)
                result += layer->bias[of->first + to];
            results[to] = add_to_output ? results[to] + result : result;
        }
    }
}

EXPORT void NAME(blocks_part)(const block_layer *layer, const block_inputs *memory, int64_t rows, int64_t part,
                              float *output, int64_t output_floats, int64_t add_to_output)
{
    const int64_t panels = panels_of(rows), first_row = part % panels * PANEL_ROWS;
    const segment *of = layer->segments;
    int64_t block = part / panels;
    for (int64_t blocks; block >= (blocks = (of->columns + COLUMNS - 1) / COLUMNS); of++)
        block -= blocks;
    numbers totals[PANEL_ROWS];
    panel in = {memory->values, memory->scales, memory->sums, memory->floats, rows, first_row, 0};
    in.count = smaller(PANEL_ROWS, rows - first_row);
    const int64_t stop = smaller((block + 1) * COLUMNS, of->columns);
#if defined(FORM_amx)
    if (in.count >= LEAST_TILE_ROWS)
        configure_groups(in.count);
#endif
    for (int64_t first = block * COLUMNS; first < stop; first += TILE) {
        tile weights = {of->weights + first * of->row_bytes, {0}, of->row_bytes};
        int64_t count = smaller(TILE, stop - first);
        for (int64_t i = 0; i < TILE; i++)
            weights.offsets[i] = (int32_t)(smaller(i, count - 1) * of->row_bytes);
        memset(totals, 0, sizeof(numbers) * (size_t)in.count);
        product(of->type, &weights, &in, layer->size, totals);
        write(layer, of, first, count, &in, totals, output, output_floats, (int)add_to_output);
    }
#if defined(FORM_amx)
    if (in.count >= LEAST_TILE_ROWS)
        _tile_release();
#endif
}

EXPORT void NAME(blocks_linear)(const block_call *call)
{
    const block_layer *layer = call->layer;
    shared_loop *loops = call->loops;
    for (int64_t row = take_part(loops); row < call->rows; row = next_part(loops))
        NAME(blocks_read)(layer, call->inputs + row * layer->size, 0, call->rows, row, &call->memory);
    wait_for_parts(loops, call->rows);
    const int64_t parts = layer->blocks * panels_of(call->rows);
    for (int64_t part = take_part(loops + 1); part < parts; part = next_part(loops + 1))
        NAME(blocks_part)(layer, &call->memory, call->rows, part, call->output, call->output_floats, 0);
    wait_for_parts(loops + 1, parts);
}

INLINE float widen_half(uint16_t half)
{
    float wide[LANES];
    uint16_t halves[LANES] = {half};
    store(wide, load_f16(halves));
    return wide[0];
}

EXPORT void NAME(blocks_rows)(int64_t type, const uint8_t *weights, int64_t row_bytes, int64_t size, const int64_t *rows,
                              int64_t count, float *output)
{
    for (int64_t number = 0; number < count; number++) {
        const uint8_t *row = weights + rows[number] * row_bytes;
        for (int64_t i = 0; i < size; i++) {
            float result;
            uint16_t half = 0, other = 0;
            if (type == F32) {
                memcpy(&result, row + 4 * i, 4);
            } else if (type == F16 || type == BF16) {
                memcpy(&half, row + 2 * i, 2);
                result = type == F16 ? widen_half(half) : bits_to_float((uint32_t)half << 16);
            } else if (type < Q4_K) {
                int minima = type == Q4_1 || type == Q5_1, five = type == Q5_0 || type == Q5_1, eight = type == Q8_0;
                int64_t bits_at = minima ? 4 : 2, at = bits_at + 4 * five, in = i % GROUP;
                const uint8_t *block = row + i / GROUP * (at + (eight ? 32 : 16));
                memcpy(&half, block, 2), memcpy(&other, block + 2, 2);
                int32_t weight = eight ? (int8_t)block[at + in] : block[at + in % 16] >> in / 16 * 4 & 15;
                if (five)
                    weight |= (block[bits_at + in / 8] >> in % 8 & 1) << 4;
                weight -= minima || eight ? 0 : five ? 16 : 8;
                result = widen_half(half) * (float)weight + (minima ? widen_half(other) : 0);
            } else if (type == Q6_K) {
                const uint8_t *block = row + i / SUPER * 210;
                int64_t in = i % SUPER, quarter = in / GROUP % 4, n = in / 128, l = in % GROUP;
                memcpy(&half, block + 208, 2);
                int32_t weight = block[64 * n + 32 * (quarter % 2) + l] >> quarter / 2 * 4 & 15;
                weight |= (block[128 + 32 * n + l] >> 2 * quarter & 3) << 4;
                result = widen_half(half) * (float)(int8_t)block[192 + in / 16] * (float)(weight - 32);
            } else {
                int five = type == Q5_K;
                const uint8_t *block = row + i / SUPER * (five ? 176 : 144), *packed = block + 4;
                int64_t in = i % SUPER, j = in / GROUP, l = in % GROUP;
                memcpy(&half, block, 2), memcpy(&other, block + 2, 2);
                int32_t scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
                int32_t minimum = j < 4 ? packed[j + 4] & 63 : packed[j + 4] >> 4 | packed[j] >> 6 << 4;
                int32_t weight = block[(five ? 48 : 16) + j / 2 * 32 + l] >> j % 2 * 4 & 15;
                if (five)
                    weight |= (block[16 + l] >> j & 1) << 4;
                result = widen_half(half) * (float)scale * (float)weight - widen_half(other) * (float)minimum;
            }
            output[number * size + i] = result;
        }
    }
}
