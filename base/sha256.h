/* SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104) for joining a world; not for bulk data. Pure; any thread. */
#ifndef EPX_BASE_SHA256_H
#define EPX_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { EPX_SHA256_BYTES = 32, EPX_SHA256_BLOCK_BYTES = 64 };

typedef struct {
    uint32_t h[8];
    uint64_t n_bytes; /* taken so far */
    uint8_t block[EPX_SHA256_BLOCK_BYTES];
} epx_sha256_t;

void epx_sha256_init(epx_sha256_t *s);
void epx_sha256_update(epx_sha256_t *s, const void *data, size_t n_bytes);
/* Finish; *s must be initialised again before another use. */
void epx_sha256_final(epx_sha256_t *s, uint8_t out_digest[EPX_SHA256_BYTES]);
/* Keyed hash of one message; keys of any length. */
void epx_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t n_bytes, uint8_t out_mac[EPX_SHA256_BYTES]);
/* 1 when equal; the time does not depend on where they differ. */
int epx_equal_constant_time(const void *a, const void *b, size_t n_bytes);

#endif
