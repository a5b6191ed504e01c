/* Unicode normalization form C. Private to engine/tokenizer; pure. */
#ifndef EPX_ENGINE_TOKENIZER_NFC_H
#define EPX_ENGINE_TOKENIZER_NFC_H

#include <stddef.h>

#include "base/status.h"
#include "base/str.h"

/* 1 when valid UTF-8 text is surely NFC already: every character is below U+0300. 0 means "look closer". */
int epx_nfc_is_plain(const char *text, size_t n_bytes);
/* Replace *out by the NFC of valid UTF-8 text. Linear in n_bytes, whatever the combining marks. */
epx_status_t epx_nfc(const char *text, size_t n_bytes, epx_str_t *out);

#endif
