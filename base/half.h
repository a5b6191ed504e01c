/* Number formats of 16 and 8 bits, converted in software: the definition that vector and GPU code must match.
 * Rounding is to nearest even everywhere. NaN results are canonical (bf16 0x7FFF, f16 0x7FFF, e4m3 0x7F with the sign
 * dropped), so that sentinel words (0xFFFF..) are never emitted. Source: IEEE 754-2019; OCP 8-bit FP v1.0 (E4M3). */
#ifndef EPX_BASE_HALF_H
#define EPX_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t epx_f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float epx_bits_f32(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline float epx_bf16_to_f32(uint16_t h) { return epx_bits_f32((uint32_t)h << 16); }
static inline uint16_t epx_f32_to_bf16(float f) {
    uint32_t u = epx_f32_bits(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}
float epx_f16_to_f32(uint16_t h);
uint16_t epx_f32_to_f16(float f); /* overflow: infinity */
float epx_e4m3_to_f32(uint8_t b);
uint8_t epx_f32_to_e4m3(float f); /* saturates at +-448; infinities too */

#endif
