/* SHA-256 against FIPS 180-4 examples (and pieces of every size against one piece), HMAC against RFC 4231. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/sha256.h"

static void to_hex(const uint8_t *d, char *out) {
    for (int i = 0; i < EPX_SHA256_BYTES; i++) snprintf(out + 2 * i, 3, "%02x", d[i]);
}

static void assert_digest(const void *data, size_t n, size_t piece, const char *want) {
    epx_sha256_t s;
    uint8_t d[EPX_SHA256_BYTES];
    char hex[2 * EPX_SHA256_BYTES + 1];
    epx_sha256_init(&s);
    for (size_t i = 0; i < n; i += piece) epx_sha256_update(&s, (const char *)data + i, n - i < piece ? n - i : piece);
    epx_sha256_final(&s, d);
    to_hex(d, hex);
    assert_string_equal(hex, want);
}

static void digests_of_the_standard(void **state) {
    (void)state;
    static char million[1000000];
    const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    memset(million, 'a', sizeof million);
    assert_digest("", 0, 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    assert_digest("abc", 3, 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    for (size_t piece = 1; piece <= 56; piece++)
        assert_digest(two, 56, piece, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    assert_digest(million, sizeof million, 997, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* RFC 4231 sections 4.2 to 4.8, without the truncated case 5. */
static void macs_of_rfc_4231(void **state) {
    (void)state;
    static uint8_t key[131], data[50], counting[25];
    const char *large = "Test Using Larger Than Block-Size Key - Hash Key First";
    const char *larger =
        "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
        "hashed before being used by the HMAC algorithm.";
    for (int i = 0; i < 25; i++) counting[i] = (uint8_t)(i + 1);
    const struct {
        const void *key;
        size_t key_bytes;
        int fill; /* of `key` */
        const void *data;
        size_t n;
        int data_fill; /* of `data` */
        const char *mac;
    } cases[] = {
        {key, 20, 0x0b, "Hi There", 8, 0, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {"Jefe", 4, 0, "what do ya want for nothing?", 28, 0, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {key, 20, 0xaa, data, 50, 0xdd, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {counting, 25, 0, data, 50, 0xcd, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
        {key, 131, 0xaa, large, 54, 0, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {key, 131, 0xaa, larger, 152, 0, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint8_t mac[EPX_SHA256_BYTES];
        char hex[2 * EPX_SHA256_BYTES + 1];
        memset(key, cases[i].fill, sizeof key);
        memset(data, cases[i].data_fill, sizeof data);
        epx_hmac_sha256(cases[i].key, cases[i].key_bytes, cases[i].data, cases[i].n, mac);
        to_hex(mac, hex);
        assert_string_equal(hex, cases[i].mac);
    }
}

static void comparison_sees_every_byte(void **state) {
    (void)state;
    uint8_t a[32] = {0}, b[32] = {0};
    assert_true(epx_equal_constant_time(a, b, sizeof a));
    for (size_t i = 0; i < sizeof a; i++) {
        b[i] = 0x80;
        assert_false(epx_equal_constant_time(a, b, sizeof a));
        b[i] = 0;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(digests_of_the_standard),
        cmocka_unit_test(macs_of_rfc_4231),
        cmocka_unit_test(comparison_sees_every_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
