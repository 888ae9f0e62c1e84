/* Which instruction sets this CPU and its operating system support.
 *
 * Compiled once, for the baseline: it must run on every CPU of the architecture.
 */
#include <string.h>

#include "export.h"

#define TEXT(token) #token
#define TEXT_OF(macro) TEXT(macro)

PUBLIC int setfold_supports(const char *isa);
PUBLIC const char *setfold_sources(void);

/* Returns the digest of the sources, which build.py passes as -DSOURCES. */
const char *setfold_sources(void) { return TEXT_OF(SOURCES); }

#ifdef __x86_64__
#include <cpuid.h>
#include <stdint.h>

/* Bits of cpuid, by leaf and register. */
#define LEAF1_ECX                                                                                  \
    (1u << 12 /* FMA */ | 1u << 22 /* MOVBE */ | 1u << 27 /* OSXSAVE */                            \
     | 1u << 28 /* AVX */ | 1u << 29 /* F16C */)
#define LEAF7_EBX_V3 (1u << 3 /* BMI1 */ | 1u << 5 /* AVX2 */ | 1u << 8 /* BMI2 */)
#define LEAF7_EBX_V4                                                                               \
    (1u << 16 /* AVX512F */ | 1u << 17 /* DQ */ | 1u << 28 /* CD */                                \
     | 1u << 30 /* BW */ | 1u << 31 /* VL */)
#define EXTENDED_ECX (1u << 5 /* LZCNT */)

/* Registers that the operating system saves (XCR0). */
#define SAVES_YMM 0x06u /* XMM, YMM */
#define SAVES_ZMM 0xe6u /* and opmask, ZMM */

static int has(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

static uint32_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* The highest level of x86-64 that is supported, of 1 (the baseline), 3 and 4. */
static int level(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, LEAF1_ECX)) return 1;
    if (!__get_cpuid(0x80000001u, &a, &b, &c, &d) || !has(c, EXTENDED_ECX)) return 1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, LEAF7_EBX_V3)) return 1;
    uint32_t saved = saved_registers();
    if (!has(saved, SAVES_YMM)) return 1;
    return has(b, LEAF7_EBX_V4) && has(saved, SAVES_ZMM) ? 4 : 3;
}

/* Returns 1 if functions compiled for `isa` can run here, 0 if not or if `isa` is unknown. */
int setfold_supports(const char *isa) {
    if (strcmp(isa, "base") == 0) return 1;
    if (strcmp(isa, "v3") == 0) return level() >= 3;
    if (strcmp(isa, "v4") == 0) return level() >= 4;
    return 0;
}
#elif defined(__aarch64__)
int setfold_supports(const char *isa) {
    return strcmp(isa, "neon") == 0; /* part of every aarch64 */
}
#else
int setfold_supports(const char *isa) { return strcmp(isa, "base") == 0; }
#endif
