/* Straight from the definitions: FIPS 180-4 sections 4.1.2, 5.1.1 and 6.2; RFC 2104 section 2. */
#include "base/sha256.h"

#include <string.h>

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t x, int n) { return x >> n | x << (32 - n); }

static uint32_t load_be(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

static void store_be(uint8_t *p, uint32_t v) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (24 - 8 * i));
}

static void schedule(const uint8_t *block, uint32_t w[64]) {
    for (int t = 0; t < 16; t++) w[t] = load_be(block + 4 * t);
    for (int t = 16; t < 64; t++) {
        uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
}

static void compress(uint32_t h[8], const uint8_t *block) {
    uint32_t w[64], v[8];
    schedule(block, w);
    memcpy(v, h, sizeof v);
    for (int t = 0; t < 64; t++) {
        uint32_t s1 = rotr(v[4], 6) ^ rotr(v[4], 11) ^ rotr(v[4], 25), choose = (v[4] & v[5]) ^ (~v[4] & v[6]);
        uint32_t s0 = rotr(v[0], 2) ^ rotr(v[0], 13) ^ rotr(v[0], 22);
        uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        uint32_t t1 = v[7] + s1 + choose + round_constants[t] + w[t];
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + s0 + majority;
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}

void epx_sha256_init(epx_sha256_t *s) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memset(s, 0, sizeof *s);
    memcpy(s->h, start, sizeof start);
}

void epx_sha256_update(epx_sha256_t *s, const void *data, size_t n_bytes) {
    const uint8_t *p = data;
    while (n_bytes > 0) {
        size_t at = (size_t)(s->n_bytes % EPX_SHA256_BLOCK_BYTES), n = EPX_SHA256_BLOCK_BYTES - at;
        if (n > n_bytes) n = n_bytes;
        memcpy(s->block + at, p, n);
        s->n_bytes += n;
        p += n;
        n_bytes -= n;
        if (at + n == EPX_SHA256_BLOCK_BYTES) compress(s->h, s->block);
    }
}

void epx_sha256_final(epx_sha256_t *s, uint8_t out_digest[EPX_SHA256_BYTES]) {
    static const uint8_t zeros[EPX_SHA256_BLOCK_BYTES];
    uint64_t n_bits = s->n_bytes * 8;
    uint8_t one = 0x80, length[8];
    store_be(length, (uint32_t)(n_bits >> 32));
    store_be(length + 4, (uint32_t)n_bits);
    epx_sha256_update(s, &one, 1);
    size_t at = (size_t)(s->n_bytes % EPX_SHA256_BLOCK_BYTES);
    epx_sha256_update(s, zeros, (EPX_SHA256_BLOCK_BYTES + 56 - at) % EPX_SHA256_BLOCK_BYTES);
    epx_sha256_update(s, length, sizeof length);
    for (int i = 0; i < 8; i++) store_be(out_digest + 4 * i, s->h[i]);
}

void epx_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t n_bytes, uint8_t out_mac[EPX_SHA256_BYTES]) {
    uint8_t pad[EPX_SHA256_BLOCK_BYTES] = {0}, inner[EPX_SHA256_BYTES];
    epx_sha256_t s;
    if (key_bytes > sizeof pad) {
        epx_sha256_init(&s);
        epx_sha256_update(&s, key, key_bytes);
        epx_sha256_final(&s, pad);
    } else if (key_bytes > 0) {
        memcpy(pad, key, key_bytes);
    }
    for (size_t i = 0; i < sizeof pad; i++) pad[i] ^= 0x36;
    epx_sha256_init(&s);
    epx_sha256_update(&s, pad, sizeof pad);
    epx_sha256_update(&s, data, n_bytes);
    epx_sha256_final(&s, inner);
    for (size_t i = 0; i < sizeof pad; i++) pad[i] ^= 0x36 ^ 0x5c;
    epx_sha256_init(&s);
    epx_sha256_update(&s, pad, sizeof pad);
    epx_sha256_update(&s, inner, sizeof inner);
    epx_sha256_final(&s, out_mac);
}

int epx_equal_constant_time(const void *a, const void *b, size_t n_bytes) {
    const volatile uint8_t *x = a, *y = b;
    uint8_t differ = 0;
    for (size_t i = 0; i < n_bytes; i++) differ |= (uint8_t)(x[i] ^ y[i]);
    return differ == 0;
}
