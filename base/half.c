/* Software conversions of f16 and fp8 e4m3. Any thread. */
#include "base/half.h"

float epx_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3FFu;
    if (e == 31) return epx_bits_f32(sign | 0x7F800000u | (m << 13));
    if (e) return epx_bits_f32(sign | ((e + 112) << 23) | (m << 13));
    float v = (float)m * 0x1p-24f;
    return epx_bits_f32(epx_f32_bits(v) | sign);
}

/* Round |f| (finite) to a grid with `man` mantissa bits and least exponent `emin`; exact in f32. */
static float round_to_grid(float a, int man, int emin) {
    uint32_t u = epx_f32_bits(a);
    int e = (int)(u >> 23) - 127;
    if (e < emin) { /* subnormal of the target: adding 2^(emin - man + 23) leaves exactly its grid */
        float magic = epx_bits_f32((uint32_t)(emin - man + 23 + 127) << 23);
        volatile float t = a + magic;
        return t - magic;
    }
    int drop = 23 - man;
    u += ((1u << (drop - 1)) - 1) + ((u >> drop) & 1u);
    return epx_bits_f32(u & ~((1u << drop) - 1));
}

uint16_t epx_f32_to_f16(float f) {
    uint32_t u = epx_f32_bits(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) return 0x7FFFu;
    if (u >= 0x47800000u) return (uint16_t)(sign | 0x7C00u); /* >= 65536 */
    float r = round_to_grid(epx_bits_f32(u), 10, -14);
    uint32_t b = epx_f32_bits(r);
    if (r < 0x1p-14f) return (uint16_t)(sign | (uint32_t)(r * 0x1p24f));
    return (uint16_t)(sign | ((((b >> 23) - 112) << 10) | ((b >> 13) & 0x3FFu))); /* 65520.. carries into infinity */
}

float epx_e4m3_to_f32(uint8_t b) {
    uint32_t sign = (uint32_t)(b & 0x80u) << 24, e = (b >> 3) & 15u, m = b & 7u;
    if (e == 15 && m == 7) return epx_bits_f32(0x7FC00000u);
    if (e) return epx_bits_f32(sign | ((e + 120) << 23) | (m << 20));
    float v = (float)m * 0x1p-9f;
    return epx_bits_f32(epx_f32_bits(v) | sign);
}

uint8_t epx_f32_to_e4m3(float f) {
    uint32_t u = epx_f32_bits(f), sign = (u >> 24) & 0x80u;
    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) return 0x7Fu;
    float a = epx_bits_f32(u);
    if (a >= 448.0f) return (uint8_t)(sign | 0x7Eu);
    float r = round_to_grid(a, 3, -6);
    if (r < 0x1p-6f) return (uint8_t)(sign | (uint32_t)(r * 0x1p9f));
    uint32_t b = epx_f32_bits(r);
    uint32_t v = (((b >> 23) - 120) << 3) | ((b >> 20) & 7u);
    return (uint8_t)(sign | (v > 0x7Eu ? 0x7Eu : v));
}
