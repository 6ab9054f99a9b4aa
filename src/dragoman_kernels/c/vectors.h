/* Vectors of 16 FP32 numbers: `floats`, and the operations that kernels need, for each form.
 *
 * An operation gives the same bits in a form whatever the other lanes hold. Forms differ from each other in the last
 * bits: `mul_add` rounds once where the CPU has the instruction and twice in the portable form. */
#ifndef DRAGOMAN_VECTORS_H
#define DRAGOMAN_VECTORS_H

#if defined(FORM_avx2) || defined(FORM_avx512) || defined(FORM_avx512_bf16)
#include <immintrin.h>
#elif defined(FORM_neon)
#include <arm_neon.h>
#endif

#if defined(FORM_avx512) || defined(FORM_avx512_bf16)
#define WIDE_REGISTERS 1 /* 32 registers of 16 numbers */
#else
#define WIDE_REGISTERS 0
#endif

INLINE float bits_to_float(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

#if WIDE_REGISTERS /* --------------------------------------------------------------------------------- AVX-512 */

typedef __m512 floats;

INLINE floats load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store(float *to, floats a) { _mm512_storeu_ps(to, a); }
INLINE floats all(float number) { return _mm512_set1_ps(number); }
INLINE floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats divide(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats mul_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats min_of(floats a, floats b) { return _mm512_min_ps(a, b); }
INLINE floats max_of(floats a, floats b) { return _mm512_max_ps(a, b); }
INLINE floats load_bf16(const uint16_t *from)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE floats all_bf16(const uint16_t *from)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_set1_epi16((short)*from), 16));
}
INLINE floats load_f16(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
INLINE void store_bf16(uint16_t *to, floats a)
{
#if defined(FORM_avx512_bf16)
    __m256bh rounded = _mm512_cvtneps_pbh(a);
    memcpy(to, &rounded, 32);
#else
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, quiet);
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
/* 2 to the power of n, from the bits of n + 1.5 * 2^23. */
INLINE floats power_of_two(floats shifted)
{
    __m512i exponent = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
INLINE void split(floats a, __m128 quarters[4])
{
    quarters[0] = _mm512_castps512_ps128(a), quarters[1] = _mm512_extractf32x4_ps(a, 1);
    quarters[2] = _mm512_extractf32x4_ps(a, 2), quarters[3] = _mm512_extractf32x4_ps(a, 3);
}

#elif defined(FORM_avx2) /* ------------------------------------------------------------------------------ AVX2 */

typedef struct {
    __m256 low, high;
} floats;

INLINE floats load(const float *from) { return (floats){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void store(float *to, floats a) { _mm256_storeu_ps(to, a.low), _mm256_storeu_ps(to + 8, a.high); }
INLINE floats all(float number) { return (floats){_mm256_set1_ps(number), _mm256_set1_ps(number)}; }
INLINE floats add(floats a, floats b) { return (floats){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE floats sub(floats a, floats b) { return (floats){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE floats mul(floats a, floats b) { return (floats){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE floats divide(floats a, floats b)
{
    return (floats){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
INLINE floats mul_add(floats a, floats b, floats c)
{
    return (floats){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE floats min_of(floats a, floats b)
{
    return (floats){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
INLINE floats max_of(floats a, floats b)
{
    return (floats){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
INLINE __m256 widen_bf16(const uint16_t *from)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE floats load_bf16(const uint16_t *from) { return (floats){widen_bf16(from), widen_bf16(from + 8)}; }
INLINE floats all_bf16(const uint16_t *from)
{
    __m256 number = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_set1_epi16((short)*from), 16));
    return (floats){number, number};
}
INLINE floats load_f16(const uint16_t *from)
{
    return (floats){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)))};
}
INLINE __m256i round_to_bf16(__m256 a)
{
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
INLINE void store_bf16(uint16_t *to, floats a)
{
    __m256i packed = _mm256_packus_epi32(round_to_bf16(a.low), round_to_bf16(a.high));
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(packed, 0xd8));
}
INLINE __m256 half_power_of_two(__m256 shifted)
{
    __m256i exponent = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE floats power_of_two(floats shifted)
{
    return (floats){half_power_of_two(shifted.low), half_power_of_two(shifted.high)};
}
INLINE void split(floats a, __m128 quarters[4])
{
    quarters[0] = _mm256_castps256_ps128(a.low), quarters[1] = _mm256_extractf128_ps(a.low, 1);
    quarters[2] = _mm256_castps256_ps128(a.high), quarters[3] = _mm256_extractf128_ps(a.high, 1);
}

#else /* ------------------------------------------------------------------------------- NEON, and any other CPU */

/* Four vectors of four numbers, which compilers translate for every CPU. */
typedef float quarter __attribute__((vector_size(16)));
typedef int32_t int_quarter __attribute__((vector_size(16)));
typedef uint32_t bits_quarter __attribute__((vector_size(16)));
typedef struct {
    quarter of[4];
} floats;

#define EACH_QUARTER(expression)                                                                                       \
    floats result;                                                                                                     \
    UNROLL for (int i = 0; i < 4; i++) result.of[i] = (expression);                                                    \
    return result;

INLINE quarter select_quarter(int_quarter where, quarter yes, quarter no)
{
    return (quarter)(((int_quarter)yes & where) | ((int_quarter)no & ~where));
}
INLINE floats load(const float *from)
{
    floats result;
    memcpy(&result, from, sizeof result);
    return result;
}
INLINE void store(float *to, floats a) { memcpy(to, &a, sizeof a); }
INLINE floats all(float number) { EACH_QUARTER(((quarter){number, number, number, number})) }
INLINE floats add(floats a, floats b) { EACH_QUARTER(a.of[i] + b.of[i]) }
INLINE floats sub(floats a, floats b) { EACH_QUARTER(a.of[i] - b.of[i]) }
INLINE floats mul(floats a, floats b) { EACH_QUARTER(a.of[i] * b.of[i]) }
INLINE floats divide(floats a, floats b) { EACH_QUARTER(a.of[i] / b.of[i]) }
#if defined(FORM_neon)
INLINE floats mul_add(floats a, floats b, floats c)
{
    EACH_QUARTER((quarter)vfmaq_f32((float32x4_t)c.of[i], (float32x4_t)a.of[i], (float32x4_t)b.of[i]))
}
#else
INLINE floats mul_add(floats a, floats b, floats c) { EACH_QUARTER(a.of[i] * b.of[i] + c.of[i]) }
#endif
INLINE floats min_of(floats a, floats b) { EACH_QUARTER(select_quarter(a.of[i] < b.of[i], a.of[i], b.of[i])) }
INLINE floats max_of(floats a, floats b) { EACH_QUARTER(select_quarter(b.of[i] < a.of[i], a.of[i], b.of[i])) }
INLINE floats load_bf16(const uint16_t *from)
{
    EACH_QUARTER((quarter)((bits_quarter){from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]} << 16))
}
INLINE floats all_bf16(const uint16_t *from) { return all(bits_to_float((uint32_t)*from << 16)); }
INLINE float widen_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00)
        return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* The exponents of FP16 begin at 2^-14, those of FP32 at 2^-126: a product with 2^112, exact for subnormal numbers. */
    float scaled = bits_to_float(rest << 13) * bits_to_float(0x77800000);
    uint32_t bits;
    memcpy(&bits, &scaled, 4);
    return bits_to_float(bits | sign);
}
INLINE floats load_f16(const uint16_t *from)
{
    float wide[LANES];
    for (int i = 0; i < LANES; i++)
        wide[i] = widen_f16(from[i]);
    return load(wide);
}
INLINE void store_bf16(uint16_t *to, floats a)
{
    uint32_t bits[LANES];
    memcpy(bits, &a, sizeof bits);
    for (int i = 0; i < LANES; i++) {
        uint32_t rounded = bits[i] + 0x7fff + (bits[i] >> 16 & 1); /* ties to even */
        to[i] = (uint16_t)(((bits[i] & 0x7fffffff) > 0x7f800000 ? bits[i] | 0x400000 : rounded) >> 16);
    }
}
INLINE floats power_of_two(floats shifted) { EACH_QUARTER((quarter)(((bits_quarter)shifted.of[i] + 127) << 23)) }

#endif /* ------------------------------------------------------------------------------------------ all forms */

#if defined(FORM_avx2) || WIDE_REGISTERS
/* Combine lane i and i + 8, then i and i + 4, then i and i + 2, then the last two, by `add` or `max`. */
#define COMBINE_LANES(a, operation)                                                                                    \
    __m128 q[4];                                                                                                       \
    split(a, q);                                                                                                       \
    __m128 four = _mm_##operation##_ps(_mm_##operation##_ps(q[0], q[2]), _mm_##operation##_ps(q[1], q[3]));            \
    __m128 two = _mm_##operation##_ps(four, _mm_movehl_ps(four, four));                                                \
    return _mm_cvtss_f32(_mm_##operation##_ss(two, _mm_movehdup_ps(two)));

INLINE float lane_sum(floats a) { COMBINE_LANES(a, add) }
/* The largest lane, of which none is NaN. */
INLINE float lane_max(floats a) { COMBINE_LANES(a, max) }
#else
/* In the same order. */
INLINE float lane_sum(floats a)
{
    quarter four = (a.of[0] + a.of[2]) + (a.of[1] + a.of[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
INLINE float lane_max(floats a)
{
    float lanes[LANES], largest;
    store(lanes, a);
    largest = lanes[0];
    for (int i = 1; i < LANES; i++)
        largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}
#endif

/* e to the power of each lane, within 2 units in the last place, clamped to e^-87 and e^88; NaN stays NaN.
 *
 * The exponent is split into n * log(2) and a rest within log(2) / 2 (Cody and Waite 1980): 2^n is built from its bits,
 * the rest is evaluated by its Taylor series. */
INLINE floats exponential(floats exponent)
{
    static const float divisors[] = {720, 120, 24, 6, 2, 1, 1};
    /* Of a NaN, min_of and max_of return their second argument. */
    floats clamped = min_of(all(88.0f), max_of(all(-87.0f), exponent));
    floats shifted = mul_add(clamped, all(1.4426950408889634f), all(12582912.0f)); /* 1.5 * 2^23 rounds to an integer */
    floats n = sub(shifted, all(12582912.0f));
    floats rest = mul_add(n, all(-0.693359375f), clamped);
    rest = mul_add(n, all(2.12194440e-4f), rest);
    floats result = all(1.0f / 5040);
    UNROLL for (int i = 0; i < 7; i++) result = mul_add(result, rest, all(1.0f / divisors[i]));
    return mul(result, power_of_two(shifted));
}

#endif
