/* Checkpoint files: finding, checking, mapping. See checkpoint.h. */
#include "engine/model/load/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/str.h"
#include "engine/model/common/json_doc.h"
#include "engine/model/load/safetensors.h"

enum { PATH_BYTES = 4096, INDEX_MAX_BYTES = 256 << 20 };
#define SINGLE_NAME "model.safetensors"
#define INDEX_NAME "model.safetensors.index.json"

typedef struct {
    char *path; /* owned */
    int fd;     /* -1: not opened yet */
    epx_safetensors_t st;
} shard_t;

typedef struct {
    void *addr;
    size_t n_bytes;
} mapping_t;

struct epx_checkpoint {
    char *dir;
    json_t *weight_map; /* owned object name -> file name; NULL: one file */
    shard_t *shards;
    size_t n_shards;
    mapping_t *maps;
    size_t n_maps;
    uint64_t mapped_bytes;
};

/* One wanted tensor resolved to bytes of a shard. */
typedef struct {
    const epx_want_t *want;
    const epx_safetensors_entry_t *entry;
    size_t shard_idx;
    uint64_t off, n_bytes;  /* in the file; of the slice where only one is wanted */
    epx_weight_t *scale_of; /* NULL, or the view of the e4m3 matrix whose factors these are */
    const void *data;
} found_t;

static epx_status_t open_shard(shard_t *s) {
    struct stat sb;
    uint8_t first[8];
    uint64_t n_json;
    int fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* not blocked by a FIFO; no effect on a regular file */
    if (fd < 0) return epx_fail_errno(errno == ENOENT ? EPX_ERR_NOT_FOUND : EPX_ERR_IO, errno, "%s: cannot be opened", s->path);
    epx_status_t st = EPX_OK;
    char *json = NULL;
    if (fstat(fd, &sb) != 0 || !S_ISREG(sb.st_mode)) st = epx_fail(EPX_ERR_IO, "%s: not a regular file", s->path);
    if (st == EPX_OK && sb.st_size >= 8 && pread(fd, first, 8, 0) != 8) st = epx_fail(EPX_ERR_IO, "%s: cannot be read", s->path);
    if (st == EPX_OK) st = epx_safetensors_header_bytes(s->path, first, (uint64_t)sb.st_size, &n_json);
    if (st == EPX_OK && !(json = malloc(n_json)))
        st = epx_fail(EPX_ERR_NOMEM, "%s: no memory for a header of %" PRIu64 " bytes", s->path, n_json);
    if (st == EPX_OK && pread(fd, json, n_json, 8) != (ssize_t)n_json)
        st = epx_fail(EPX_ERR_IO, "%s: the header cannot be read", s->path);
    if (st == EPX_OK) st = epx_safetensors_parse(s->path, json, n_json, (uint64_t)sb.st_size, &s->st);
    free(json);
    if (st == EPX_OK) s->fd = fd;
    else close(fd);
    return st;
}

/* Index of the shard of this file name, added when new. */
static epx_status_t shard_of(epx_checkpoint_t *ck, const char *file, size_t *out_idx) {
    char path[PATH_BYTES];
    if (strchr(file, '/') || !file[0] || file[0] == '.')
        return epx_fail(EPX_ERR_FORMAT, "%s/%s: weight_map names the file \"%s\", expected a plain file name", ck->dir,
                        INDEX_NAME, file);
    if (snprintf(path, sizeof path, "%s/%s", ck->dir, file) >= (int)sizeof path)
        return epx_fail(EPX_ERR_ARG, "%s: path too long", ck->dir);
    size_t i = 0;
    while (i < ck->n_shards && strcmp(ck->shards[i].path, path) != 0) i++;
    if (i == ck->n_shards) {
        shard_t *grown = realloc(ck->shards, (i + 1) * sizeof *grown);
        if (!grown) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for %zu shards", ck->dir, i + 1);
        ck->shards = grown;
        char *own = strdup(path);
        if (!own) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for a path", path);
        ck->shards[i] = (shard_t){.path = own, .fd = -1};
        ck->n_shards++;
    }
    if (ck->shards[i].fd < 0) EPX_TRY(open_shard(&ck->shards[i]));
    *out_idx = i;
    return EPX_OK;
}

static epx_status_t read_index(epx_checkpoint_t *ck, const char *path) {
    char *text;
    size_t n_bytes;
    epx_json_doc_t doc;
    EPX_TRY(epx_read_file(path, INDEX_MAX_BYTES, &text, &n_bytes));
    epx_status_t s = epx_json_doc_parse(path, text, n_bytes, &doc);
    free(text);
    if (s < 0) return s;
    json_t *map = json_object_get(doc.root, "weight_map");
    if (json_is_object(map)) ck->weight_map = json_incref(map);
    else s = epx_fail(EPX_ERR_FORMAT, "%s: weight_map is missing or not an object", path);
    epx_json_doc_fini(&doc);
    return s;
}

epx_status_t epx_checkpoint_open(const char *dir, epx_checkpoint_t **out_ck) {
    char single[PATH_BYTES], index[PATH_BYTES];
    if (snprintf(single, sizeof single, "%s/%s", dir, SINGLE_NAME) >= (int)sizeof single ||
        snprintf(index, sizeof index, "%s/%s", dir, INDEX_NAME) >= (int)sizeof index)
        return epx_fail(EPX_ERR_ARG, "model path has %zu characters, at most %d", strlen(dir), PATH_BYTES - 32);
    epx_checkpoint_t *ck = calloc(1, sizeof *ck);
    if (!ck || !(ck->dir = strdup(dir))) {
        free(ck);
        return epx_fail(EPX_ERR_NOMEM, "%s: no memory to open the checkpoint", dir);
    }
    epx_status_t s = EPX_OK;
    size_t idx;
    if (access(single, F_OK) == 0) s = shard_of(ck, SINGLE_NAME, &idx);
    else if (access(index, F_OK) == 0) s = read_index(ck, index);
    else s = epx_fail(EPX_ERR_NOT_FOUND, "%s: has neither %s nor %s", dir, SINGLE_NAME, INDEX_NAME);
    if (s < 0) {
        epx_checkpoint_close(ck);
        return s;
    }
    *out_ck = ck;
    return EPX_OK;
}

static epx_status_t find_one(epx_checkpoint_t *ck, const epx_want_t *w, found_t *out) {
    const char *file = SINGLE_NAME;
    if (ck->weight_map) {
        const json_t *v = json_object_get(ck->weight_map, w->name);
        if (!json_is_string(v))
            return epx_fail(EPX_ERR_NOT_FOUND, "%s/%s: tensor \"%s\" is missing", ck->dir, INDEX_NAME, w->name);
        file = json_string_value(v);
    }
    epx_status_t st = shard_of(ck, file, &out->shard_idx);
    if (st == EPX_ERR_NOT_FOUND && ck->weight_map)
        return epx_fail_context(st, "%s/%s: weight_map names %s for tensor \"%s\"", ck->dir, INDEX_NAME, file, w->name);
    if (st < 0) return st;
    const shard_t *s = &ck->shards[out->shard_idx];
    out->want = w;
    out->entry = epx_safetensors_find(&s->st, w->name);
    if (!out->entry) {
        char shape[80];
        return epx_fail(EPX_ERR_NOT_FOUND, "%s: tensor \"%s\" of shape %s is missing", s->path, w->name,
                        epx_shape_text(w->shape, w->n_dims, shape, sizeof shape));
    }
    return EPX_OK;
}

static epx_status_t check_one(const epx_checkpoint_t *ck, const found_t *f) {
    const epx_tensor_t *t = &f->entry->tensor;
    const char *path = ck->shards[f->shard_idx].path;
    char has[160], need[80];
    if (t->n_dims != f->want->n_dims || memcmp(t->shape, f->want->shape, (size_t)t->n_dims * sizeof t->shape[0]) != 0)
        return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\" has shape %s, expected %s", path, t->name,
                        epx_shape_text(t->shape, t->n_dims, has, sizeof has),
                        epx_shape_text(f->want->shape, f->want->n_dims, need, sizeof need));
    if (t->dtype != EPX_TENSOR_BF16 && t->dtype != EPX_TENSOR_F32 && !(t->dtype == EPX_TENSOR_F8_E4M3 && f->want->allow_f8))
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: tensor \"%s\" has dtype %s, supported: BF16, F32%s", path, t->name,
                        epx_tensor_dtype_name(t->dtype), f->want->allow_f8 ? ", F8_E4M3" : "");
    if (f->entry->file_off % epx_tensor_dtype_bytes(t->dtype))
        return epx_fail(EPX_ERR_UNSUPPORTED,
                        "%s: tensor \"%s\" begins at byte %" PRIu64 " of the file, expected a multiple of %zu", path, t->name,
                        f->entry->file_off, epx_tensor_dtype_bytes(t->dtype));
    return EPX_OK;
}

/* The bytes of a found tensor that are wanted. */
static void locate(found_t *f) {
    const epx_tensor_t *t = &f->entry->tensor;
    f->n_bytes = f->want->sliced ? t->n_bytes / (uint64_t)t->shape[0] : t->n_bytes;
    f->off = f->entry->file_off + (f->want->sliced ? f->n_bytes * (uint64_t)f->want->slice : 0);
}

static epx_status_t find_checked(epx_checkpoint_t *ck, const epx_want_t *w, found_t *out) {
    EPX_TRY(find_one(ck, w, out));
    EPX_TRY(check_one(ck, out));
    locate(out);
    return EPX_OK;
}

/* The factors of an e4m3 matrix: one for each block, bf16 or f32. `scale` is filled as their want. */
static epx_status_t find_scale(epx_checkpoint_t *ck, const epx_want_t *w, epx_want_t *scale, found_t *out) {
    *scale = (epx_want_t){.n_dims = 2, .view = w->view};
    if (snprintf(scale->name, sizeof scale->name, "%s_scale_inv", w->name) >= (int)sizeof scale->name)
        return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": the name of its factors is too long", ck->dir, w->name);
    for (int i = 0; i < 2; i++) scale->shape[i] = (w->shape[i] + EPX_W_SCALE_BLOCK - 1) / EPX_W_SCALE_BLOCK;
    EPX_TRY(find_checked(ck, scale, out));
    out->scale_of = w->view;
    return EPX_OK;
}

static int by_place(const void *a, const void *b) {
    const found_t *x = a, *y = b;
    if (x->shard_idx != y->shard_idx) return x->shard_idx < y->shard_idx ? -1 : 1;
    return x->off < y->off ? -1 : x->off > y->off;
}

/* Map found[0..n) as one range of whole pages; they lie in one shard, ascending, each beginning in or before the page where the
 * one before it ends. */
static epx_status_t map_run(epx_checkpoint_t *ck, found_t *found, size_t n, uint64_t page) {
    const shard_t *s = &ck->shards[found[0].shard_idx];
    uint64_t begin = found[0].off / page * page;
    uint64_t end = found[n - 1].off + found[n - 1].n_bytes;
    size_t n_bytes = (size_t)((end + page - 1) / page * page - begin);
    void *addr = mmap(NULL, n_bytes, PROT_READ, MAP_PRIVATE, s->fd, (off_t)begin);
    if (addr == MAP_FAILED)
        return epx_fail_errno(EPX_ERR_OS, errno, "%s: cannot map %zu bytes at %" PRIu64, s->path, n_bytes, begin);
    madvise(addr, n_bytes, MADV_WILLNEED);
    ck->maps[ck->n_maps++] = (mapping_t){addr, n_bytes};
    ck->mapped_bytes += n_bytes;
    for (size_t i = 0; i < n; i++) found[i].data = (const char *)addr + (found[i].off - begin);
    return EPX_OK;
}

/* How many of found[0..n) one mapping takes. */
static size_t run_length(const found_t *found, size_t n, uint64_t page) {
    size_t i = 1;
    while (i < n && found[i].shard_idx == found[0].shard_idx) {
        uint64_t end = found[i - 1].off + found[i - 1].n_bytes;
        if (found[i].off / page * page > end) break;
        i++;
    }
    return i;
}

static epx_status_t map_all(epx_checkpoint_t *ck, found_t *found, size_t n, epx_load_progress_t progress) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    mapping_t *grown = realloc(ck->maps, (ck->n_maps + n) * sizeof *grown);
    if (!grown) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for %zu mappings", ck->dir, n);
    ck->maps = grown;
    for (size_t i = 0; i < n;) {
        size_t len = run_length(found + i, n - i, page);
        EPX_TRY(map_run(ck, found + i, len, page));
        i += len;
        if (progress.fn) progress.fn(progress.ctx, "map weights", (double)i / (double)n);
    }
    return EPX_OK;
}

static epx_wtype_t weight_type(const found_t *f) {
    const epx_tensor_dtype_t t = f->entry->tensor.dtype;
    return t == EPX_TENSOR_BF16 ? EPX_W_BF16 : t == EPX_TENSOR_F32 ? EPX_W_F32 : EPX_W_F8_E4M3;
}

static void give_views(const found_t *found, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (found[i].scale_of) continue;
        epx_weight_t v = epx_want_view(found[i].want);
        v.data = found[i].data;
        v.type = weight_type(&found[i]);
        *found[i].want->view = v;
    }
    for (size_t i = 0; i < n; i++) {
        if (!found[i].scale_of) continue;
        found[i].scale_of->scale = found[i].data;
        found[i].scale_of->scale_type = weight_type(&found[i]);
    }
}

epx_status_t epx_checkpoint_map(epx_checkpoint_t *ck, const epx_want_t *wants, size_t n_wants, epx_load_progress_t progress) {
    if (n_wants == 0) return EPX_OK;
    found_t *found = calloc(n_wants, 2 * sizeof *found); /* a matrix and its factors */
    epx_want_t *scales = calloc(n_wants, sizeof *scales);
    epx_status_t s = EPX_OK;
    size_t n = 0;
    if (!found || !scales) s = epx_fail(EPX_ERR_NOMEM, "%s: no memory for %zu tensors", ck->dir, n_wants);
    for (size_t i = 0; i < n_wants && s == EPX_OK; i++) {
        s = find_checked(ck, &wants[i], &found[n++]);
        if (s == EPX_OK && found[n - 1].entry->tensor.dtype == EPX_TENSOR_F8_E4M3)
            s = find_scale(ck, &wants[i], &scales[i], &found[n++]);
    }
    if (s == EPX_OK) {
        qsort(found, n, sizeof *found, by_place);
        s = map_all(ck, found, n, progress);
    }
    if (s == EPX_OK) give_views(found, n);
    free(found);
    free(scales);
    return s;
}

uint64_t epx_checkpoint_mapped_bytes(const epx_checkpoint_t *ck) { return ck->mapped_bytes; }

void epx_checkpoint_close(epx_checkpoint_t *ck) {
    if (!ck) return;
    for (size_t i = 0; i < ck->n_maps; i++) munmap(ck->maps[i].addr, ck->maps[i].n_bytes);
    for (size_t i = 0; i < ck->n_shards; i++) {
        if (ck->shards[i].fd >= 0) close(ck->shards[i].fd);
        epx_safetensors_fini(&ck->shards[i].st);
        free(ck->shards[i].path);
    }
    json_decref(ck->weight_map);
    free(ck->maps);
    free(ck->shards);
    free(ck->dir);
    free(ck);
}
