/* What must be the same on all nodes: flags, limits from the environment, and the files of the model. */
#ifndef EPX_APP_NODE_FACTS_H
#define EPX_APP_NODE_FACTS_H

#include "app/settings.h"
#include "base/str.h"

/* Append one line "name\tvalue\n" for every flag that concerns the ranks, and for every file of the model directory that a rank
 * or a tokenizer reads: size and a SHA-256 of its bytes. Of safetensors files the header and 64 blocks of 4 KiB spread over the
 * rest are hashed. Secrets are left out. EPX_ERR_NOT_FOUND, EPX_ERR_IO: the directory or a file cannot be read. */
epx_status_t epx_node_facts(const epx_settings_t *s, epx_str_t *out);

#endif
