/* tokenizer.json to tables. What the file asks for and we do not do is refused by field and value; nothing is guessed. */
#include "engine/tokenizer/tokenizer_internal.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "engine/tokenizer/nfc.h"

#define MAX_FILE_BYTES ((size_t)512 << 20)

/* GPT-2's pattern, the ByteLevel pre-tokenizer's own (openai/gpt-2, encoder.py). */
static const char GPT2_PATTERN[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* ---- reading fields ---- */

static const char *kind_name(const json_t *j) {
    static const char *const name[] = {"an object", "an array", "a string", "an integer", "a real", "true", "false", "null"};
    return j ? name[json_typeof(j)] : "missing";
}

/* "" for null and missing; NULL for other kinds. */
static const char *text_or_empty(const json_t *j) {
    if (j == NULL || json_is_null(j)) return "";
    return json_string_value(j);
}

static epx_status_t get_bool(const json_t *o, const char *where, const char *key, int fallback, int *out) {
    const json_t *j = json_object_get(o, key);
    if (j && !json_is_null(j) && !json_is_boolean(j))
        return epx_fail(EPX_ERR_FORMAT, "%s.%s: %s; true or false expected", where, key, kind_name(j));
    *out = json_is_boolean(j) ? json_is_true(j) : fallback;
    return EPX_OK;
}

static epx_status_t get_type(const json_t *o, const char *where, const char **out_type) {
    *out_type = json_string_value(json_object_get(o, "type"));
    if (*out_type) return EPX_OK;
    return epx_fail(EPX_ERR_FORMAT, "%s.type: %s; a string expected", where, kind_name(json_object_get(o, "type")));
}

static epx_status_t get_id(const json_t *j, const char *where, const char *what, int32_t *out_id) {
    json_int_t v = json_integer_value(j);
    if (!json_is_integer(j))
        return epx_fail(EPX_ERR_FORMAT, "%s: id of \"%.60s\" is %s; an integer expected", where, what, kind_name(j));
    if (v < 0 || v >= EPX_TOKENIZER_MAX_IDS)
        return epx_fail(EPX_ERR_FORMAT, "%s: id of \"%.60s\" is %lld; 0 to %d expected", where, what, (long long)v,
                        EPX_TOKENIZER_MAX_IDS - 1);
    *out_id = (int32_t)v;
    return EPX_OK;
}

/* ---- vocabulary and added tokens ---- */

static epx_status_t max_id(const json_t *vocab, const json_t *added, int32_t *out_max) {
    const char *key;
    json_t *value;
    size_t i;
    int32_t id = 0;
    *out_max = -1;
    json_object_foreach((json_t *)vocab, key, value) {
        EPX_TRY(get_id(value, "model.vocab", key, &id));
        if (id > *out_max) *out_max = id;
    }
    json_array_foreach(added, i, value) {
        const char *text = json_string_value(json_object_get(value, "content"));
        if (text == NULL) return epx_fail(EPX_ERR_FORMAT, "added_tokens[%zu].content: a string expected", i);
        EPX_TRY(get_id(json_object_get(value, "id"), "added_tokens", text, &id));
        if (id > *out_max) *out_max = id;
    }
    return EPX_OK;
}

static epx_status_t load_vocab(epx_tokenizer_t *t, const json_t *vocab) {
    const char *key;
    size_t key_bytes;
    json_t *value;
    json_object_keylen_foreach((json_t *)vocab, key, key_bytes, value) {
        epx_status_t s = epx_vocab_add(&t->vocab, (int32_t)json_integer_value(value), key, key_bytes, 0);
        if (s < 0) return epx_fail_context(s, "model.vocab");
    }
    return EPX_OK;
}

static epx_status_t copy_text(const epx_tokenizer_t *t, const char *text, size_t n_bytes, int normalized, epx_added_t *a) {
    epx_str_t nfc = {0};
    if (normalized && t->nfc && !epx_nfc_is_plain(text, n_bytes)) {
        EPX_TRY(epx_nfc(text, n_bytes, &nfc));
    } else {
        EPX_TRY(epx_str_append(&nfc, text, n_bytes));
    }
    a->text = nfc.data;
    a->n_bytes = nfc.n_bytes;
    return EPX_OK;
}

static epx_status_t enter_added(epx_tokenizer_t *t, const char *text, size_t n_bytes, int32_t id, int special) {
    int32_t known = epx_vocab_find(&t->vocab, text, n_bytes);
    if (known >= 0 && known != id)
        return epx_fail(EPX_ERR_FORMAT, "\"%.60s\" has id %d here and %d before", text, (int)id, (int)known);
    if (known < 0) EPX_TRY(epx_vocab_add(&t->vocab, id, text, n_bytes, 1));
    if (special) t->vocab.token[id].flags |= EPX_TOKEN_SPECIAL;
    return EPX_OK;
}

static epx_status_t load_added(epx_tokenizer_t *t, const json_t *o) {
    const json_t *content = json_object_get(o, "content");
    epx_added_t a = {.id = (int32_t)json_integer_value(json_object_get(o, "id"))};
    epx_status_t s;
    int special = 0, normalized = 0;
    if (json_string_length(content) == 0) return EPX_OK; /* the tokenizers package ignores these too */
    EPX_TRY(get_bool(o, "token", "special", 0, &special));
    EPX_TRY(get_bool(o, "token", "normalized", !special, &normalized));
    EPX_TRY(get_bool(o, "token", "single_word", 0, &a.single_word));
    EPX_TRY(get_bool(o, "token", "lstrip", 0, &a.lstrip));
    EPX_TRY(get_bool(o, "token", "rstrip", 0, &a.rstrip));
    EPX_TRY(enter_added(t, json_string_value(content), json_string_length(content), a.id, special));
    EPX_TRY(copy_text(t, json_string_value(content), json_string_length(content), normalized, &a));
    s = epx_added_push(normalized ? &t->added_normalized : &t->added_plain, &a);
    if (s < 0) free(a.text);
    return s;
}

static epx_status_t load_all_added(epx_tokenizer_t *t, const json_t *added) {
    json_t *o;
    size_t i;
    json_array_foreach(added, i, o) {
        epx_status_t s = load_added(t, o);
        if (s < 0) return epx_fail_context(s, "added_tokens[%zu]", i);
    }
    epx_added_seal(&t->added_plain);
    epx_added_seal(&t->added_normalized);
    return EPX_OK;
}

/* ---- merges ---- */

typedef struct {
    const char *left, *right;
    size_t left_bytes, right_bytes;
} merge_text_t;

/* "a b" or ["a", "b"]. */
static int read_merge(const json_t *j, merge_text_t *m) {
    const char *space;
    if (json_is_array(j) && json_array_size(j) == 2) {
        const json_t *l = json_array_get(j, 0), *r = json_array_get(j, 1);
        *m = (merge_text_t){json_string_value(l), json_string_value(r), json_string_length(l), json_string_length(r)};
        return m->left && m->right;
    }
    if (!json_is_string(j)) return 0;
    m->left = json_string_value(j);
    space = memchr(m->left, ' ', json_string_length(j));
    if (space == NULL) return 0;
    m->left_bytes = (size_t)(space - m->left);
    m->right = space + 1;
    m->right_bytes = json_string_length(j) - m->left_bytes - 1;
    return memchr(m->right, ' ', m->right_bytes) == NULL;
}

static epx_status_t load_merge(epx_tokenizer_t *t, const json_t *j, uint32_t rank, epx_str_t *joined) {
    merge_text_t m;
    int32_t left, right, id;
    if (!read_merge(j, &m)) return epx_fail(EPX_ERR_FORMAT, "\"a b\" or [\"a\", \"b\"] expected");
    left = epx_vocab_find(&t->vocab, m.left, m.left_bytes);
    right = epx_vocab_find(&t->vocab, m.right, m.right_bytes);
    epx_str_clear(joined);
    EPX_TRY(epx_str_append(joined, m.left, m.left_bytes));
    EPX_TRY(epx_str_append(joined, m.right, m.right_bytes));
    id = epx_vocab_find(&t->vocab, joined->data, joined->n_bytes);
    if (left < 0 || right < 0 || id < 0)
        return epx_fail(EPX_ERR_FORMAT, "\"%.60s\" is not in model.vocab",
                        id < 0 && left >= 0 && right >= 0 ? joined->data
                        : left < 0                        ? m.left
                                                          : m.right);
    epx_bpe_add(&t->bpe, (uint32_t)left, (uint32_t)right, rank, (uint32_t)id);
    return EPX_OK;
}

static epx_status_t load_merges(epx_tokenizer_t *t, const json_t *merges) {
    epx_status_t s = EPX_OK;
    epx_str_t joined = {0};
    json_t *j;
    size_t i;
    EPX_TRY(epx_bpe_init(&t->bpe, json_array_size(merges)));
    json_array_foreach(merges, i, j) {
        s = load_merge(t, j, (uint32_t)i, &joined);
        if (s < 0) {
            s = epx_fail_context(s, "model.merges[%zu]", i);
            break;
        }
    }
    epx_str_fini(&joined);
    return s;
}

/* ---- model ---- */

static epx_status_t check_model(const json_t *m) {
    static const char *const affix[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const char *type = json_string_value(json_object_get(m, "type")), *text;
    const json_t *dropout = json_object_get(m, "dropout");
    size_t i;
    int on = 0;
    if (type && strcmp(type, "BPE") != 0)
        return epx_fail(EPX_ERR_UNSUPPORTED, "model.type: \"%.60s\"; only BPE is supported", type);
    if (!json_is_object(json_object_get(m, "vocab")))
        return epx_fail(EPX_ERR_FORMAT, "model.vocab: %s; an object expected", kind_name(json_object_get(m, "vocab")));
    if (!json_is_array(json_object_get(m, "merges")))
        return epx_fail(EPX_ERR_FORMAT, "model.merges: %s; an array expected", kind_name(json_object_get(m, "merges")));
    if (dropout && !json_is_null(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0.0))
        return epx_fail(EPX_ERR_UNSUPPORTED, "model.dropout: %g; only null or 0 is supported", json_number_value(dropout));
    for (i = 0; i < 2; i++) {
        text = text_or_empty(json_object_get(m, affix[i]));
        if (text == NULL || *text)
            return epx_fail(EPX_ERR_UNSUPPORTED, "model.%s: \"%.60s\"; only \"\" or null is supported", affix[i],
                            text ? text : "?");
    }
    EPX_TRY(get_bool(m, "model", "byte_fallback", 0, &on));
    if (on) return epx_fail(EPX_ERR_UNSUPPORTED, "model.byte_fallback: true; only false is supported");
    return EPX_OK;
}

static epx_status_t load_model(epx_tokenizer_t *t, const json_t *root) {
    const json_t *m = json_object_get(root, "model"), *added = json_object_get(root, "added_tokens"), *vocab;
    char c[2];
    int i;
    int32_t last = -1;
    if (!json_is_object(m)) return epx_fail(EPX_ERR_FORMAT, "model: %s; an object expected", kind_name(m));
    if (added && !json_is_null(added) && !json_is_array(added))
        return epx_fail(EPX_ERR_FORMAT, "added_tokens: %s; an array expected", kind_name(added));
    EPX_TRY(check_model(m));
    vocab = json_object_get(m, "vocab");
    EPX_TRY(max_id(vocab, added, &last));
    EPX_TRY(epx_vocab_init(&t->vocab, last + 1, json_object_size(vocab) + json_array_size(added)));
    EPX_TRY(load_vocab(t, vocab));
    EPX_TRY(load_merges(t, json_object_get(m, "merges")));
    EPX_TRY(get_bool(m, "model", "ignore_merges", 0, &t->bpe.ignore_merges));
    for (i = 0; i < 256; i++) t->bpe.byte_id[i] = epx_vocab_find(&t->vocab, c, epx_byte_char((unsigned char)i, c));
    return load_all_added(t, added);
}

/* ---- normalizer ---- */

static epx_status_t load_normalizer(epx_tokenizer_t *t, const json_t *n, int depth) {
    const char *type;
    const json_t *list;
    json_t *j;
    size_t i;
    if (n == NULL || json_is_null(n)) return EPX_OK;
    if (depth > 8) return epx_fail(EPX_ERR_UNSUPPORTED, "normalizer: Sequence nested deeper than 8");
    EPX_TRY(get_type(n, "normalizer", &type));
    if (strcmp(type, "NFC") == 0) {
        t->nfc = 1;
        return EPX_OK;
    }
    if (strcmp(type, "Sequence") != 0)
        return epx_fail(EPX_ERR_UNSUPPORTED, "normalizer.type: \"%.60s\"; NFC or Sequence is supported", type);
    list = json_object_get(n, "normalizers");
    if (!json_is_array(list)) return epx_fail(EPX_ERR_FORMAT, "normalizer.normalizers: %s; an array expected", kind_name(list));
    json_array_foreach(list, i, j) EPX_TRY(load_normalizer(t, j, depth + 1));
    return EPX_OK;
}

/* ---- pre-tokenizer ---- */

static epx_status_t read_behavior(const json_t *o, const char *where, epx_split_behavior_t *out) {
    static const char *const name[] = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
    const char *text = json_string_value(json_object_get(o, "behavior"));
    size_t i;
    for (i = 0; text && i < sizeof name / sizeof *name; i++) {
        if (strcmp(text, name[i]) != 0) continue;
        *out = (epx_split_behavior_t)i;
        return EPX_OK;
    }
    return epx_fail(EPX_ERR_FORMAT, "%s.behavior: \"%.60s\"; Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous",
                    where, text ? text : kind_name(json_object_get(o, "behavior")));
}

static epx_status_t load_split(epx_tokenizer_t *t, const json_t *o, const char *where) {
    const json_t *pattern = json_object_get(o, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex"), *literal = json_object_get(pattern, "String");
    epx_split_behavior_t behavior = EPX_SPLIT_ISOLATED;
    char field[160];
    int invert = 0;
    EPX_TRY(read_behavior(o, where, &behavior));
    EPX_TRY(get_bool(o, where, "invert", 0, &invert));
    snprintf(field, sizeof field, "%s.pattern.%s", where, regex ? "Regex" : "String");
    if (json_is_string(regex))
        return epx_pretok_add_regex(&t->pretok, field, json_string_value(regex), json_string_length(regex), behavior, invert);
    if (json_is_string(literal))
        return epx_pretok_add_literal(&t->pretok, field, json_string_value(literal), json_string_length(literal), behavior,
                                      invert);
    return epx_fail(EPX_ERR_FORMAT, "%s.pattern: {\"Regex\": \"...\"} or {\"String\": \"...\"} expected", where);
}

static epx_status_t load_byte_level(epx_tokenizer_t *t, const json_t *o, const char *where) {
    int prefix = 0, use_regex = 0;
    EPX_TRY(get_bool(o, where, "add_prefix_space", 1, &prefix));
    EPX_TRY(get_bool(o, where, "use_regex", 1, &use_regex));
    if (prefix) EPX_TRY(epx_pretok_add_prefix_space(&t->pretok));
    if (!use_regex) return EPX_OK;
    return epx_pretok_add_regex(&t->pretok, where, GPT2_PATTERN, sizeof GPT2_PATTERN - 1, EPX_SPLIT_ISOLATED, 0);
}

static epx_status_t load_digits(epx_tokenizer_t *t, const json_t *o, const char *where) {
    int individual = 0;
    EPX_TRY(get_bool(o, where, "individual_digits", 0, &individual));
    return epx_pretok_add_regex(&t->pretok, where, "\\p{N}", 5, individual ? EPX_SPLIT_ISOLATED : EPX_SPLIT_CONTIGUOUS, 0);
}

/* One step; *byte_level is set by the step that must be the last. */
static epx_status_t load_step(epx_tokenizer_t *t, const json_t *o, const char *where, int *byte_level) {
    const char *type;
    EPX_TRY(get_type(o, where, &type));
    if (*byte_level)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s.type: \"%.60s\" after ByteLevel, which must be the last", where, type);
    if (strcmp(type, "Split") == 0) return load_split(t, o, where);
    if (strcmp(type, "Digits") == 0) return load_digits(t, o, where);
    if (strcmp(type, "ByteLevel") == 0) {
        *byte_level = 1;
        return load_byte_level(t, o, where);
    }
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s.type: \"%.60s\"; Sequence, Split, Digits or ByteLevel is supported", where, type);
}

static epx_status_t load_pretok(epx_tokenizer_t *t, const json_t *root) {
    const json_t *p = json_object_get(root, "pre_tokenizer"), *list;
    const char *type;
    char where[64];
    json_t *j;
    size_t i;
    int byte_level = 0;
    if (p == NULL || json_is_null(p))
        return epx_fail(EPX_ERR_UNSUPPORTED, "pre_tokenizer: %s; one with ByteLevel is supported", kind_name(p));
    EPX_TRY(get_type(p, "pre_tokenizer", &type));
    if (strcmp(type, "Sequence") != 0) {
        EPX_TRY(load_step(t, p, "pre_tokenizer", &byte_level));
    } else {
        list = json_object_get(p, "pretokenizers");
        if (!json_is_array(list))
            return epx_fail(EPX_ERR_FORMAT, "pre_tokenizer.pretokenizers: %s; an array expected", kind_name(list));
        json_array_foreach(list, i, j) {
            snprintf(where, sizeof where, "pre_tokenizer.pretokenizers[%zu]", i);
            EPX_TRY(load_step(t, j, where, &byte_level));
        }
    }
    if (!byte_level) return epx_fail(EPX_ERR_UNSUPPORTED, "pre_tokenizer: no ByteLevel; only byte-level BPE is supported");
    return EPX_OK;
}

/* The decoder must be the inverse of what we encode. */
static epx_status_t check_decoder(const json_t *root) {
    const json_t *d = json_object_get(root, "decoder");
    const char *type;
    if (d == NULL || json_is_null(d)) return EPX_OK;
    EPX_TRY(get_type(d, "decoder", &type));
    if (strcmp(type, "ByteLevel") == 0) return EPX_OK;
    return epx_fail(EPX_ERR_UNSUPPORTED, "decoder.type: \"%.60s\"; only ByteLevel is supported", type);
}

/* ---- the whole ---- */

static epx_status_t load(epx_tokenizer_t *t, const json_t *root) {
    if (!json_is_object(root)) return epx_fail(EPX_ERR_FORMAT, "%s; an object expected", kind_name(root));
    EPX_TRY(load_normalizer(t, json_object_get(root, "normalizer"), 0));
    EPX_TRY(load_pretok(t, root));
    EPX_TRY(check_decoder(root));
    return load_model(t, root);
}

epx_status_t epx_tokenizer_create_from_memory(const char *name, const char *json, size_t n_bytes, epx_tokenizer_t **out_tok) {
    json_error_t e;
    json_t *root = NULL;
    epx_status_t s;
    epx_tokenizer_t *t = calloc(1, sizeof *t);
    if (t == NULL) return epx_fail(EPX_ERR_NOMEM, "%s: tokenizer", name);
    if (n_bytes > MAX_FILE_BYTES) {
        s = epx_fail(EPX_ERR_FORMAT, "%s: %zu bytes; at most %zu", name, n_bytes, MAX_FILE_BYTES);
        goto err_load;
    }
    root = json_loadb(json, n_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    if (root == NULL) s = epx_fail(EPX_ERR_FORMAT, "%s: line %d, column %d: %s", name, e.line, e.column, e.text);
    else if ((s = load(t, root)) < 0) s = epx_fail_context(s, "%s", name);
err_load:
    json_decref(root);
    if (s < 0) epx_tokenizer_destroy(t);
    else *out_tok = t;
    return s;
}

epx_status_t epx_tokenizer_create(const char *path, epx_tokenizer_t **out_tok) {
    char *data;
    size_t n_bytes;
    epx_status_t s;
    EPX_TRY(epx_read_file(path, MAX_FILE_BYTES, &data, &n_bytes));
    s = epx_tokenizer_create_from_memory(path, data, n_bytes, out_tok);
    free(data);
    return s;
}

void epx_tokenizer_destroy(epx_tokenizer_t *t) {
    if (t == NULL) return;
    epx_vocab_fini(&t->vocab);
    epx_bpe_fini(&t->bpe);
    epx_added_fini(&t->added_plain);
    epx_added_fini(&t->added_normalized);
    epx_pretok_fini(&t->pretok);
    free(t);
}
