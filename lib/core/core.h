/* Private structures of core: world and group; tables of what is built. The plan is in spi/a2a.h. */
#ifndef EPX_CORE_CORE_H
#define EPX_CORE_CORE_H

#include "boot/boot.h"
#include "spi/a2a.h"
#include "spi/device.h"
#include "spi/transport.h"
#include "spi/wait.h"

struct epx_world {
    epx_boot_t boot;
    epx_peer_t *peers; /* [n_ranks], owned */
    char *transports;  /* owned copy of the allowed list, or NULL */
    uint64_t timeout_ns;
};

struct epx_group {
    int rank, n_ranks;
    epx_peer_t *peers;             /* [n_ranks] in group order, owned */
    epx_net_t *net;                /* owned */
    const epx_device_link_t *link; /* of a group on devices; else NULL */
    epx_slab_t *ctl;               /* owned: records of epx_group_allgather() */
    uint64_t *records;   /* owned, EPX_GROUP_RECORD_BYTES a rank: set-up calls gather here, so that none fails for lack of memory
                            before it has taken part */
    uint8_t *masked;     /* [n_ranks] owned; 1: takes no part any more, its death is no news. net->masked is the same */
    uint64_t epoch;      /* of the last all-gather */
    uint64_t timeout_ns; /* of set-up calls */
    uint32_t lost;       /* an all-gather has failed */
    uint32_t n_recovers; /* of all its plans, begun: the turn of their messages */
};

/* ---- registry.c: the only file that names transports and backends ---- */

/* The i-th built transport or backend in order of preference; NULL past the end. */
const epx_transport_t *epx_transport_at(int i);
const epx_a2a_t *epx_a2a_at(int i);
/* The i-th backend for devices, and the i-th device link. */
const epx_a2a_t *epx_device_a2a_at(int i);
const epx_device_link_t *epx_device_link_at(int i);
/* By name; NULL when not built. */
const epx_transport_t *epx_transport_named(const char *name, size_t len);
const epx_a2a_t *epx_a2a_named(const char *name);
/* Refusal for a name that is not built: EPX_ERR_UNSUPPORTED with the reason when it is known, else EPX_ERR_ARG with the list. */
epx_status_t epx_component_refuse(const char *kind, const char *name, size_t len);

/* ---- select.c ---- */

/* EPX_OK when every name of a comma separated list is built; NULL is allowed. */
epx_status_t epx_select_check_names(const char *transports);
/* The transport for these ranks: the first allowed one that can join them, or the best score. Same answer on all ranks. */
epx_status_t epx_select_transport(const char *allowed, const epx_peer_t *peers, int n_ranks, const epx_transport_t **out);
/* The device link for a group: the first allowed one that is available. EPX_ERR_UNSUPPORTED with the reason. */
epx_status_t epx_select_device_link(const char *allowed, const epx_device_link_t **out);
/* Which backend, and why: text for people. */
typedef struct {
    const epx_a2a_t *a2a;
    char why[EPX_WHY_BYTES];
} epx_choice_t;
/* The backend for a normalised config: cfg->backend by name; with "auto" the one of the crossover table where all of n_ranks
 * ranks are mapped (n_far 0) and it can run, else the best score that can run. Logs why others lost. net NULL: config only.
 * Errors of epx_crossover(). */
epx_status_t epx_select_a2a(const epx_net_t *net, int n_ranks, int n_far, const epx_plan_config_t *cfg, epx_choice_t *out);

/* ---- validate.c ---- */

enum { EPX_MAX_SLOTS = 1 << 24 };

/* Check every field and fill defaults: out_cfg has no EPX_BYTES and no 0 that means a default; its tables and backend stay
 * borrowed from cfg. EPX_ERR_ARG: outside the legal values; EPX_ERR_UNSUPPORTED: legal, not built yet. */
epx_status_t epx_validate_config(const epx_plan_config_t *cfg, int n_ranks, epx_plan_config_t *out_cfg);
/* The same for a group on devices, where n_blocks may be chosen; what GPUs cannot do is refused by the backend. */
epx_status_t epx_validate_device_config(const epx_plan_config_t *cfg, int n_ranks, epx_plan_config_t *out_cfg);
/* Dtype of the result of combine and of the add operand: the token dtype, or, with fp8 tokens, the dtype of the rows that come
 * back; the expert dtype when those are fp8 too. cfg: normalised. */
epx_dtype_t epx_result_dtype(const epx_plan_config_t *cfg);
/* cfg->debug, or 1 when EPX_DEBUG says so. */
int epx_debug_wanted(const epx_plan_config_t *cfg);
/* Owner of a slot under cfg, and the expert in it. */
int epx_slot_owner(const epx_plan_config_t *cfg, int n_ranks, int slot);
int epx_slot_expert(const epx_plan_config_t *cfg, int slot);
/* The two tables of a normalised config: ranks and experts in range, no expert without a slot. */
epx_status_t epx_validate_placement(const epx_plan_config_t *cfg, int n_ranks);
epx_status_t epx_validate_dispatch_send(const epx_plan_t *p, const epx_io_t *io);
epx_status_t epx_validate_dispatch_recv(const epx_plan_t *p, const epx_io_t *io);
epx_status_t epx_validate_combine_send(const epx_plan_t *p, const epx_io_t *io, int n_rows);
epx_status_t epx_validate_combine_recv(const epx_plan_t *p, const epx_io_t *io);
/* The part of it that is the same on devices. */
epx_status_t epx_validate_combine_weights(const epx_plan_t *p, const epx_io_t *io);
/* The same four for a plan on devices: pointers are not read, ids are the caller's word. validate_device.c */
epx_status_t epx_validate_device_dispatch_send(const epx_plan_t *p, const epx_io_t *io);
epx_status_t epx_validate_device_dispatch_recv(const epx_plan_t *p, const epx_io_t *io);
epx_status_t epx_validate_device_combine_send(const epx_plan_t *p, const epx_io_t *io);
epx_status_t epx_validate_device_combine_recv(const epx_plan_t *p, const epx_io_t *io);

/* ---- group.c ---- */

/* Room for one record of each rank, for set-up calls. */
static inline void *epx_group_records(epx_group_t *g) { return g->records; }
/* All ranks learn whether all succeeded: returns `mine` if negative, else the first other rank's failure, else EPX_OK. */
epx_status_t epx_group_agree(epx_group_t *g, epx_status_t mine, const char *what);

/* ---- config_hash.c ---- */

enum { EPX_CONFIG_FIELDS = 26 };
_Static_assert(EPX_CONFIG_FIELDS * 8 + 8 <= EPX_GROUP_RECORD_BYTES, "the fields of a config travel in one record");
/* Every field of a config as one number each, for comparing over ranks. with_tables 0: the two tables are not read, because
 * their length has not been checked. */
void epx_config_fields(const epx_plan_config_t *cfg, int with_tables, const char *chosen, uint64_t out_fields[EPX_CONFIG_FIELDS]);
/* Hash of a table of n ints; 1 for NULL. */
uint64_t epx_table_hash(const int *table, int n);
uint64_t epx_config_hash(const uint64_t fields[EPX_CONFIG_FIELDS]);
/* EPX_OK when all ranks gave the same; else EPX_ERR_MISMATCH naming the first field that differs, values and ranks.
 * fields_of(ctx, rank) gives a rank's array, or NULL when that rank has none to compare. */
epx_status_t epx_config_compare(const uint64_t *(*fields_of)(const void *ctx, int rank), const void *ctx, int n_ranks);

/* ---- placement.c ---- */

/* Build the places of a placement from its slot tables and p->alive. */
void epx_placement_build(epx_plan_t *p, epx_placement_t *pl);
/* Take the tables of a normalised config. */
void epx_placement_fill(epx_plan_t *p, const epx_plan_config_t *cfg, uint64_t first_epoch, epx_placement_t *pl);
/* The placement that exchange `epoch` uses. */
const epx_placement_t *epx_placement_for(const epx_plan_t *p, uint64_t epoch);
/* That of the exchange in flight on a channel, else of the next. */
const epx_placement_t *epx_plan_place(const epx_plan_t *p, int channel);

/* ---- recover.c ---- */

/* Count the places of each token that no living rank computes; with cfg.renormalize io->weights becomes the scaled ones. */
void epx_mask_apply(epx_plan_t *p, epx_io_t *io);

/* ---- step.c ---- */

/* Record the plan's first error, with this thread's message. Returns the first error. */
epx_status_t epx_plan_fail(epx_plan_t *p, epx_status_t s);

#endif
