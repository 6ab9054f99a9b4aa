/* Which forms of the kernels this CPU can run. Compiled once. */
#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Bits of the result, in the order of FORMS in dragoman_kernels/__init__.py. */
enum { PORTABLE = 1, AVX2 = 2, AVX512 = 4, AVX512_BF16 = 8, AMX = 16, NEON = 32 };

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t enabled_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

#if defined(__linux__)
/* Ask the system for the registers of AMX, for all threads of this process: arch_prctl(ARCH_REQ_XCOMP_PERM, 18). By the
 * instruction, because the library is linked without a C library. */
static int tiles_permitted(void)
{
    int64_t result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"((int64_t)158), "D"((int64_t)0x1023), "S"((int64_t)18)
                     : "rcx", "r11", "memory");
    return result == 0;
}
#else
static int tiles_permitted(void) { return 0; }
#endif

static int has(uint32_t found, uint32_t needed) { return (found & needed) == needed; }

EXPORT int64_t cpu_forms(void)
{
    uint32_t a, b, c, d, fourth = 0;
    int64_t forms = PORTABLE;
    /* Of leaf 1: FMA, OSXSAVE, AVX, F16C. The system saves the registers of AVX if bits 1 and 2 are set. */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29))
        return forms;
    uint64_t registers = enabled_registers();
    if ((registers & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, 1u << 5))
        return forms;
    forms |= AVX2;
    /* Of leaf 7: AVX512F, DQ, BW, VL. The system saves their registers if bits 5 to 7 are set. */
    if ((registers & 0xe0) != 0xe0 || !has(b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31))
        return forms;
    forms |= AVX512;
    uint32_t more = c, tiles = d; /* VBMI, VNNI; AMX */
    if (a < 1 || !__get_cpuid_count(7, 1, &fourth, &b, &c, &d) || !has(fourth, 1u << 5) || !has(more, 1u << 1 | 1u << 11))
        return forms;
    forms |= AVX512_BF16;
    /* AMX-BF16, AMX-TILE, AMX-INT8. The system saves their registers if bits 17 and 18 are set. */
    if (has(tiles, 1u << 22 | 1u << 24 | 1u << 25) && (registers & 0x60000) == 0x60000 && tiles_permitted())
        forms |= AMX;
    return forms;
}

#elif defined(__aarch64__) || defined(_M_ARM64)

EXPORT int64_t cpu_forms(void) { return PORTABLE | NEON; }

#else

EXPORT int64_t cpu_forms(void) { return PORTABLE; }

#endif
