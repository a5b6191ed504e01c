/* Plans from inside and outside on one rank: layout regions, every refusal of validate.c, placement, order of calls, ids,
 * capacity, bytes, abort, components, waits. Exchange results are tested elsewhere. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib_threads.h"
#include "lib/core/core.h"

static epx_plan_config_t shape(void) {
    epx_plan_config_t c;
    epx_plan_config_init(&c);
    c.max_tokens = 8;
    c.hidden = 20;
    c.top_k = 3;
    c.n_experts = 7;
    return c;
}

/* ---- layout ---- */

static void regions_do_not_overlap(void **state) {
    (void)state;
    epx_plan_config_t c = shape(), n;
    epx_slab_layout_t l;
    c.wire_dtype = EPX_FP8_E4M3;
    c.hidden = 130;
    assert_int_equal(epx_validate_config(&c, 3, &n), EPX_OK);
    n.n_channels = 2;
    assert_int_equal(epx_slab_layout(&n, 3, EPX_REGION_D | EPX_REGION_C, &l), EPX_OK);
    assert_int_equal(l.n_scales, 2);
    uint64_t ends[][2] = {
        {l.flag_d_off, 3 * 64}, {l.flag_c_off, 3 * 64},         {l.count_off, 3 * 64},
        {l.publish_off, 64},    {l.ids_off, 3 * 8 * 3 * 4},     {l.weights_off, 3 * 8 * 3 * 4},
        {l.x_off, 8 * 130 * 4}, {l.stage_off, 8 * 130},         {l.stage_scale_off, 8 * 2 * 4},
        {l.d_off, 3 * 8 * 130}, {l.d_scale_off, 3 * 8 * 2 * 4}, {l.c_off, 3 * 8 * 130 * 4},
    };
    size_t m = sizeof ends / sizeof ends[0];
    for (size_t i = 0; i < m; i++) {
        assert_int_equal(ends[i][0] % 64, 0);
        assert_true(ends[i][0] + ends[i][1] <= (i + 1 < m ? ends[i + 1][0] : l.channel_bytes));
    }
    assert_true(l.leave_off >= EPX_HEAD_BYTES && l.channel_off >= l.leave_off + 3 * 64);
    assert_true(l.channel_off + 2 * l.channel_bytes <= l.total_bytes && l.total_bytes % 4096 == 0);
    assert_int_equal(epx_channel_off(&l, 1), l.channel_off + l.channel_bytes);
    assert_int_equal(epx_c_row_off(&l, 0, 2, 7) + l.combine_row_bytes, l.channel_off + l.c_off + 3 * 8 * 130 * 4);
}

static void control_words_do_not_move_with_capacity(void **state) {
    (void)state;
    epx_plan_config_t c = shape(), n;
    epx_slab_layout_t a, b;
    assert_int_equal(epx_validate_config(&c, 4, &n), EPX_OK);
    assert_int_equal(epx_slab_layout(&n, 4, EPX_REGION_C, &a), EPX_OK);
    n.max_tokens = 999;
    n.hidden = 7;
    assert_int_equal(epx_slab_layout(&n, 4, EPX_REGION_C, &b), EPX_OK);
    assert_int_equal(epx_flag_d_off(&a, 0, 3), epx_flag_d_off(&b, 0, 3));
    assert_int_equal(epx_flag_c_off(&a, 0, 3), epx_flag_c_off(&b, 0, 3));
    assert_int_equal(epx_count_off(&a, 0, 3), epx_count_off(&b, 0, 3));
}

/* ---- validate ---- */

typedef struct {
    const char *field;
    size_t offset;
    int value;
    epx_status_t status;
} refusal_t;

#define REFUSE(f, v, s) \
    { #f, offsetof(epx_plan_config_t, f), v, s }

static void refusals_name_field_and_value(void **state) {
    (void)state;
    static const refusal_t table[] = {
        REFUSE(max_tokens, 0, EPX_ERR_ARG),
        REFUSE(max_tokens, -1, EPX_ERR_ARG),
        REFUSE(hidden, 0, EPX_ERR_ARG),
        REFUSE(top_k, 0, EPX_ERR_ARG),
        REFUSE(top_k, 65, EPX_ERR_ARG),
        REFUSE(n_experts, 0, EPX_ERR_ARG),
        REFUSE(n_slots, 6, EPX_ERR_ARG),
        REFUSE(token_dtype, 5, EPX_ERR_ARG),
        REFUSE(token_dtype, 4, EPX_ERR_UNSUPPORTED),
        REFUSE(wire_dtype, 1, EPX_ERR_ARG),
        REFUSE(wire_dtype, 4, EPX_ERR_UNSUPPORTED),
        REFUSE(expert_dtype, 3, EPX_ERR_UNSUPPORTED),
        REFUSE(combine_dtype, 9, EPX_ERR_ARG),
        REFUSE(scale_block, 1024, EPX_ERR_UNSUPPORTED),
        REFUSE(scale_block, 0, EPX_ERR_ARG),
        REFUSE(scale_format, 2, EPX_ERR_ARG),
        REFUSE(scale_layout, 1, EPX_ERR_ARG),
        REFUSE(layout, 3, EPX_ERR_ARG),
        REFUSE(align, 0, EPX_ERR_ARG),
        REFUSE(align, 16, EPX_ERR_ARG),
        REFUSE(combine, 2, EPX_ERR_UNSUPPORTED), /* REDUCED: on devices only */
        REFUSE(combine, 3, EPX_ERR_ARG),
        REFUSE(replicate, 3, EPX_ERR_ARG),
        REFUSE(replicate, 0, EPX_ERR_ARG),
        REFUSE(n_channels, 65, EPX_ERR_ARG),
        REFUSE(n_channels, 0, EPX_ERR_ARG),
        REFUSE(n_blocks, 8, EPX_ERR_UNSUPPORTED),
        REFUSE(renormalize, 2, EPX_ERR_ARG),
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        epx_plan_config_t c = shape();
        size_t bytes = 77;
        memcpy((char *)&c + table[i].offset, &table[i].value, sizeof(int));
        assert_int_equal(epx_plan_bytes(&c, 2, &bytes), table[i].status);
        assert_int_equal(bytes, 77);
        char want[64];
        snprintf(want, sizeof want, "%s is ", table[i].field);
        if (strstr(epx_last_error(), want) == NULL) fail_msg("%s: %s", want, epx_last_error());
    }
}

static void placement_tables_are_checked(void **state) {
    (void)state;
    int rank[7] = {0, 1, 2, 0, 1, 2, 3}, expert[7] = {6, 5, 4, 3, 2, 1, 1};
    epx_plan_config_t c = shape(), n;
    c.slot_rank = rank;
    assert_int_equal(epx_validate_config(&c, 3, &n), EPX_ERR_ARG);
    assert_string_equal(epx_last_error(), "slot_rank[6] is 3; legal: 0 to 2");
    rank[6] = 0;
    c.slot_expert = expert;
    assert_int_equal(epx_validate_config(&c, 3, &n), EPX_ERR_ARG); /* expert 0 has no slot */
    assert_non_null(strstr(epx_last_error(), "no slot for expert 0"));
    expert[6] = 7;
    assert_int_equal(epx_validate_config(&c, 3, &n), EPX_ERR_ARG);
    expert[6] = 0;
    assert_int_equal(epx_validate_config(&c, 3, &n), EPX_OK);
    c.slot_rank = NULL; /* even split of 7 over 3: 3, 2, 2 */
    assert_int_equal(epx_validate_config(&c, 3, &n), EPX_OK);
    static const int owners[7] = {0, 0, 0, 1, 1, 2, 2};
    for (int s = 0; s < 7; s++) assert_int_equal(epx_slot_owner(&n, 3, s), owners[s]);
    c.n_experts = 2; /* fewer experts than ranks */
    c.slot_expert = NULL;
    assert_int_equal(epx_validate_config(&c, 3, &n), EPX_OK);
    assert_int_equal(epx_slot_owner(&n, 3, 1), 1);
}

static void sizes_that_overflow_are_refused(void **state) {
    (void)state;
    epx_plan_config_t c = shape();
    size_t bytes;
    c.max_tokens = INT_MAX / 2;
    assert_int_equal(epx_plan_bytes(&c, 4096, &bytes), EPX_ERR_CAPACITY);
    c.hidden = INT_MAX / 2;
    c.top_k = 64;
    assert_int_equal(epx_plan_bytes(&c, 4096, &bytes), EPX_ERR_CAPACITY);
    assert_int_equal(epx_plan_bytes(&c, 0, &bytes), EPX_ERR_ARG);
    c = shape();
    c.backend = "onesidde";
    assert_int_equal(epx_plan_bytes(&c, 2, &bytes), EPX_ERR_ARG);
    assert_non_null(strstr(epx_last_error(), "onesided, collective, ref"));
    c.backend = "nccl";
    assert_int_equal(epx_plan_bytes(&c, 2, &bytes), EPX_ERR_UNSUPPORTED);
    c.size = 3;
    assert_int_equal(epx_plan_bytes(&c, 2, &bytes), EPX_ERR_ARG);
}

static void first_difference_is_named(void **state) {
    (void)state;
    epx_plan_config_t c = shape();
    int table[7] = {0};
    uint64_t f[EPX_CONFIG_FIELDS], g[EPX_CONFIG_FIELDS];
    epx_config_fields(&c, 1, NULL, f);
    c.slot_rank = table;
    epx_config_fields(&c, 1, NULL, g);
    assert_true(epx_config_hash(f) != epx_config_hash(g));
    table[3] = 1;
    epx_config_fields(&c, 1, NULL, f);
    assert_true(epx_config_hash(f) != epx_config_hash(g));
}

/* ---- one rank ---- */

typedef struct {
    epx_world_t *w;
    epx_group_t *g;
} self_t;

static self_t open_self(void) {
    self_t s = {NULL, NULL};
    epx_world_config_t cfg;
    epx_world_config_init(&cfg);
    cfg.bootstrap = "self";
    assert_int_equal(epx_world_create(&cfg, &s.w), EPX_OK);
    assert_int_equal(epx_group_create(s.w, NULL, 0, -1, &s.g), EPX_OK);
    return s;
}

static void close_self(self_t *s) {
    epx_group_destroy(s->g);
    epx_world_destroy(s->w);
}

static void calls_out_of_order_are_refused(void **state) {
    (void)state;
    self_t s = open_self();
    epx_plan_config_t c = shape();
    epx_plan_t *p;
    epx_io_t io;
    epx_lists_t lists;
    float x[20] = {1}, weight[3] = {2, 3, 5}, out[20];
    int32_t ids[3] = {1, 1, -1};
    assert_int_equal(epx_plan_create(s.g, &c, &p), EPX_OK);
    epx_io_init(&io);
    assert_int_equal(epx_dispatch_recv(p, &io), EPX_ERR_STATE);
    assert_string_equal(epx_last_error(), "dispatch_recv called on channel 0; expected: dispatch_send");
    assert_int_equal(epx_combine(p, &io), EPX_ERR_STATE);
    assert_int_equal(epx_plan_lists(p, 0, &lists), EPX_ERR_STATE);
    io.x = x, io.ids = ids, io.weights = weight, io.n_tokens = 1;
    assert_int_equal(epx_dispatch(p, &io), EPX_OK);
    assert_int_equal(epx_dispatch_send(p, &io), EPX_ERR_STATE);
    assert_int_equal(epx_plan_lists(p, 0, &lists), EPX_OK);
    assert_int_equal(lists.n_rows, 1); /* a repeated id is one row */
    io.x = NULL;
    assert_int_equal(epx_combine_send(p, &io), EPX_ERR_ARG);
    io.x = x;
    assert_int_equal(epx_combine_send(p, &io), EPX_OK);
    assert_int_equal(epx_combine_recv(p, &io), EPX_ERR_ARG);
    assert_non_null(strstr(epx_last_error(), "out_x is NULL"));
    io.out_x = out;
    assert_int_equal(epx_combine_recv(p, &io), EPX_OK);
    assert_true(out[0] == 5.0f); /* both places count: 2 + 3 */
    epx_plan_destroy(p);
    close_self(&s);
}

static void bad_step_arguments_change_nothing(void **state) {
    (void)state;
    self_t s = open_self();
    epx_plan_config_t c = shape();
    epx_plan_t *p;
    epx_io_t io;
    float x[9 * 20] = {0}, weight[27] = {0};
    int32_t ids[27] = {0};
    assert_int_equal(epx_plan_create(s.g, &c, &p), EPX_OK);
    epx_io_init(&io);
    io.x = x, io.ids = ids, io.weights = weight, io.n_tokens = 9;
    assert_int_equal(epx_dispatch_send(p, &io), EPX_ERR_CAPACITY);
    io.n_tokens = 8;
    ids[3 * 5 + 2] = 7;
    assert_int_equal(epx_dispatch_send(p, &io), EPX_ERR_ARG);
    assert_string_equal(epx_last_error(), "ids[token 5][k 2] is 7; legal: -1 (not sent) to 6");
    ids[3 * 5 + 2] = -2;
    assert_int_equal(epx_dispatch_send(p, &io), EPX_ERR_ARG);
    ids[3 * 5 + 2] = -1;
    io.channel = 1;
    assert_int_equal(epx_dispatch_send(p, &io), EPX_ERR_ARG);
    io.channel = 0;
    io.weights = NULL;
    assert_int_equal(epx_dispatch_send(p, &io), EPX_ERR_ARG);
    io.weights = weight;
    io.out_x = x;
    assert_int_equal(epx_dispatch(p, &io), EPX_ERR_ARG); /* the fused call checks the second half before it sends */
    io.out_x = NULL;
    assert_int_equal(epx_dispatch(p, &io), EPX_OK);
    epx_plan_destroy(p);
    close_self(&s);
}

static void abort_ends_the_plan(void **state) {
    (void)state;
    self_t s = open_self();
    epx_plan_config_t c = shape();
    epx_plan_t *p;
    epx_io_t io;
    assert_int_equal(epx_plan_create(s.g, &c, &p), EPX_OK);
    epx_io_init(&io);
    assert_int_equal(epx_plan_poll(p), EPX_OK);
    assert_int_equal(epx_plan_abort(p), EPX_OK);
    assert_int_equal(epx_plan_poll(p), EPX_ERR_ABORTED);
    assert_int_equal(epx_dispatch(p, &io), EPX_ERR_ABORTED);
    assert_int_equal(epx_group_mask(s.g, 0, 0), EPX_ERR_ARG);
    assert_int_equal(epx_plan_recover(p), EPX_OK);
    assert_int_equal(epx_plan_poll(p), EPX_OK);
    assert_int_equal(epx_dispatch(p, &io), EPX_OK);
    epx_plan_destroy(p);
    close_self(&s);
}

static void groups_overlap_and_refuse(epx_world_t *w, int rank, void *arg) {
    static const int some[] = {2, 0}, twice[] = {1, 1};
    epx_group_t *a = NULL, *b = NULL, *c = NULL;
    int *bad = arg, all[3], mine = rank * 10;
    if (epx_group_create(w, some, 2, -1, &a) != EPX_OK || epx_group_create(w, NULL, 0, -1, &b) != EPX_OK) bad[rank] = 1;
    if ((a == NULL) != (rank == 1) || epx_group_create(w, twice, 2, -1, &c) != EPX_ERR_ARG ||
        epx_group_create(w, NULL, 0, 0, &c) != EPX_ERR_UNSUPPORTED)
        bad[rank] = 2;
    for (int i = 0; i < 100 && bad[rank] == 0; i++) {
        mine = rank * 10 + i;
        if (a != NULL && (epx_group_allgather(a, &mine, sizeof mine, all, 0) || all[0] != 20 + i || all[1] != i)) bad[rank] = 3;
        if (epx_group_allgather(b, &mine, sizeof mine, all, 0) || all[0] != i || all[1] != 10 + i || all[2] != 20 + i)
            bad[rank] = 4;
    }
    if (a != NULL && (epx_group_rank(a) != (rank == 2 ? 0 : 1) || epx_group_size(a) != 2)) bad[rank] = 5;
    epx_group_destroy(a);
    epx_group_destroy(b);
}

static void groups(void **state) {
    (void)state;
    int bad[3] = {0};
    assert_int_equal(lib_run(3, groups_overlap_and_refuse, bad), EPX_OK);
    assert_int_equal(bad[0] + bad[1] + bad[2], 0);
}

static void worlds_and_components(void **state) {
    (void)state;
    epx_world_config_t cfg;
    epx_world_t *w;
    epx_component_t c;
    int n = 0, found = 0;
    epx_world_config_init(&cfg);
    assert_int_equal(epx_world_create(&cfg, &w), EPX_ERR_ARG);
    cfg.bootstrap = "file:x";
    assert_int_equal(epx_world_create(&cfg, &w), EPX_ERR_UNSUPPORTED);
    cfg.bootstrap = "selfish";
    assert_int_equal(epx_world_create(&cfg, &w), EPX_ERR_ARG);
    cfg.bootstrap = "self";
    cfg.transports = "shm,nvshmem";
    assert_int_equal(epx_world_create(&cfg, &w), EPX_ERR_UNSUPPORTED);
    cfg.transports = "shn";
    assert_int_equal(epx_world_create(&cfg, &w), EPX_ERR_ARG);
    assert_non_null(strstr(epx_last_error(), "self, shm"));
    for (; epx_component(n, &c) == EPX_OK; n++)
        found += strcmp(c.name, "ucx") != 0 && c.available && c.detail[0] != '\0'; /* ucx: as the machine has it */
    assert_int_equal(found, 7); /* two transports, three backends, two wrappers */
    assert_int_equal(n, 11);
}

/* ---- waits ---- */

typedef struct {
    epx_slab_head_t head;
    uint64_t word;
} small_slab_t;

static small_slab_t data_slabs[2], ctl_slabs[2];
static int says_last_word;

/* Called inside a wait, before it looks whether the peer has left: the peer does so just then. */
static int peer_leaves(epx_net_t *net) {
    (void)net;
    if (says_last_word) epx_store_release_u64(&data_slabs[0].word, 1);
    epx_store_release_u32(&ctl_slabs[1].head.left, 1);
    return -1;
}

/* What rank 0's wait for rank 1 returns when rank 1 leaves during it; *out_aborted: rank 1's slab was aborted. */
static epx_status_t wait_while_leaving(int last_word, int *out_aborted) {
    epx_transport_t transport = {.name = "none", .dead_rank = peer_leaves};
    epx_peer_t peers[2] = {{.pid = 1}, {.pid = 2, .world_rank = 1}};
    char *bases[2] = {(char *)&data_slabs[0], (char *)&data_slabs[1]},
         *ctl_bases[2] = {(char *)&ctl_slabs[0], (char *)&ctl_slabs[1]};
    epx_slab_t slab = {0, 2, sizeof(small_slab_t), bases}, ctl = {0, 2, sizeof(small_slab_t), ctl_bases};
    epx_net_t net = {&transport, 0, 2, peers, 0, &ctl};
    epx_wait_t w = {&net, &slab, "all-gather", 1, UINT64_C(2000000000), NULL};
    memset(data_slabs, 0, sizeof data_slabs);
    memset(ctl_slabs, 0, sizeof ctl_slabs);
    says_last_word = last_word;
    epx_status_t s = epx_wait_ge(&w, 1, offsetof(small_slab_t, word), 1);
    *out_aborted = data_slabs[1].head.abort_word != 0;
    return s;
}

static void leaving_after_the_last_word_is_no_loss(void **state) {
    (void)state;
    int aborted;
    assert_int_equal(wait_while_leaving(1, &aborted), EPX_OK);
    assert_false(aborted);
    assert_int_equal(wait_while_leaving(0, &aborted), EPX_ERR_PEER);
    assert_true(aborted);
    assert_non_null(strstr(epx_last_error(), "rank 1 (pid 2) has left the group"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(regions_do_not_overlap),
        cmocka_unit_test(control_words_do_not_move_with_capacity),
        cmocka_unit_test(refusals_name_field_and_value),
        cmocka_unit_test(placement_tables_are_checked),
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(first_difference_is_named),
        cmocka_unit_test(calls_out_of_order_are_refused),
        cmocka_unit_test(bad_step_arguments_change_nothing),
        cmocka_unit_test(abort_ends_the_plan),
        cmocka_unit_test(groups),
        cmocka_unit_test(worlds_and_components),
        cmocka_unit_test(leaving_after_the_last_word_is_no_loss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
