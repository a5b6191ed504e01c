/* UTF-8 decoding shared by the tokenizer and the chat templates. Private to engine/tokenizer; pure.
 * Not here: the public epx_utf8_* calls, declared in tokenizer.h. */
#ifndef EPX_ENGINE_TOKENIZER_UTF8_H
#define EPX_ENGINE_TOKENIZER_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Look at the first sequence of p[0..n), n >= 1. Returns 1 for a valid character and its length in *out_len; 0 for an invalid
 * one and the length of its maximal valid beginning (at least 1) in *out_len; -1 when the data ends inside a character. */
int epx_utf8_sequence(const char *p, size_t n, size_t *out_len);
/* Code point at p, which starts a valid sequence; its length in *out_len. */
int32_t epx_utf8_decode(const char *p, size_t *out_len);
/* Write code point c (0..0x10FFFF, no surrogate) to out[4]; returns the length. */
size_t epx_utf8_encode(int32_t c, char *out);
/* Start of the character that ends at p[end], 0 < end, p valid. */
size_t epx_utf8_back(const char *p, size_t end);
/* White_Space of Unicode, as \s of the Rust and Oniguruma engines and str.isspace() less U+001C..U+001F. */
int epx_utf8_is_space(int32_t c);
/* \w of Rust's regex crate: Alphabetic, M, Nd, Pc and Join_Control. */
int epx_utf8_is_word(int32_t c);

#endif
