/* Portable kernels: one float a "register", multiply and add rounded apart. For CPUs without AVX2 and as a third opinion in
 * tests; not tuned. */
#include <math.h>

#include "base/half.h"
#include "engine/ops/cpu/kernels.h"

#define VW 1
#define VISA scalar
#define MR_MAX 2
typedef float vf;
static inline vf v_zero(void) { return 0.0f; }
static inline vf v_set1(float x) { return x; }
static inline vf v_load(const float *p) { return *p; }
static inline void v_store(float *p, vf x) { *p = x; }
static inline vf v_loadn(const float *p, int n) { return n > 0 ? *p : 0.0f; }
static inline void v_storen(float *p, vf x, int n) {
    if (n > 0) *p = x;
}
static inline vf v_add(vf a, vf b) { return a + b; }
static inline vf v_sub(vf a, vf b) { return a - b; }
static inline vf v_mul(vf a, vf b) { return a * b; }
static inline vf v_div(vf a, vf b) { return a / b; }
static inline vf v_fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf v_max(vf a, vf b) { return a > b ? a : b; } /* b when either is NaN */
static inline vf v_min(vf a, vf b) { return a < b ? a : b; }
static inline float v_hsum(vf a) { return a; }
static inline float v_hmax(vf a) { return a; }
static inline void v_hsum4(vf a, vf b, vf c, vf d, float out[4]) { out[0] = a, out[1] = b, out[2] = c, out[3] = d; }
static inline vf v_pow2(vf n) { return epx_bits_f32((uint32_t)((int32_t)n + 127) << 23); } /* n integral, -126 .. 127 */
static inline vf v_bf16_even(const uint16_t *p) { return epx_bf16_to_f32(p[0]); }
static inline vf v_bf16_odd(const uint16_t *p) { return epx_bf16_to_f32(p[1]); }
/* e4m3 as f16 bits: the value divided by 256. */
static inline vf v_f8(const uint8_t *p) { return epx_f16_to_f32((uint16_t)((p[0] & 0x80) << 8 | (p[0] & 0x7F) << 7)); }
static inline void v_unzip(vf a, vf b, vf *even, vf *odd) { *even = a, *odd = b; }

#include "engine/ops/cpu/kernels_impl.h"
