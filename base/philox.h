/* Philox4x32-10 counter-based random numbers: the same stream on every device.
 * Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11. */
#ifndef EPX_BASE_PHILOX_H
#define EPX_BASE_PHILOX_H

#include <stdint.h>

/* out[4] = Philox4x32-10(counter[4], key[2]). */
static inline void epx_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int i = 0; i < 10; i++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
/* The idx-th 32-bit word of the stream `seed`. */
static inline uint32_t epx_philox_u32(uint64_t seed, uint64_t idx) {
    uint32_t c[4] = {(uint32_t)(idx / 4), (uint32_t)((idx / 4) >> 32), 0, 0}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)},
             o[4];
    epx_philox4x32(c, k, o);
    return o[idx % 4];
}
/* Uniform in [0, 1) with 24 bits. */
static inline float epx_philox_unit(uint64_t seed, uint64_t idx) { return (float)(epx_philox_u32(seed, idx) >> 8) * 0x1p-24f; }

#endif
