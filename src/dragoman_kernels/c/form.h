/* What a kernel needs in every form: names, attributes, vectors of 16 numbers.
 *
 * The build compiles each kernel once per form with FORM defined: portable, avx2, avx512, avx512_bf16, amx or neon. A
 * function of a kernel is called NAME(function): function_avx2, and so on. */
#ifndef DRAGOMAN_FORM_H
#define DRAGOMAN_FORM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* But for products, it is avx512_bf16. */
#if defined(FORM_amx)
#define FORM_avx512_bf16 1
#endif

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(function) JOIN(function, FORM)

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
/* Of functions whose constant arguments choose one of several loops. */
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

#if !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 8")
#elif __has_feature(address_sanitizer) /* unrolled loops with checks would take clang minutes */
#define UNROLL
#else
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

#if defined(FORM_portable)
#define PORTABLE 1
#else
#define PORTABLE 0
#endif

/* Numbers of a vector. */
#define LANES 16

#include "vectors.h"

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

#endif
