/* What the env bootstrap makes of a launcher's variables. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lib/boot/env.h"
#include "epx/epx.h"

static void clear(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "OMPI_MCA_orte_hnp_uri",
                                        "OMPI_MCA_ess_base_jobid",
                                        "PMIX_NAMESPACE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALNRANKS",
                                        "PMI_JOBID",
                                        "SLURM_JOB_ID",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_NNODES",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_JOB_NODELIST",
                                        "EPX_INIT_ADDR"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) unsetenv(names[i]);
}

static void set(const char *name, const char *value) { assert_int_equal(setenv(name, value, 1), 0); }

static void assert_says(const char *what) {
    epx_boot_env_t e;
    assert_int_equal(epx_boot_env_read(&e), EPX_ERR_ARG);
    if (strstr(epx_last_error(), what) == NULL) fail_msg("\"%s\" lacks \"%s\"", epx_last_error(), what);
}

static void assert_found(const char *launcher, int rank, int n_ranks, const char *host, epx_boot_env_t *out) {
    epx_boot_env_t e;
    if (epx_boot_env_read(&e) != EPX_OK) fail_msg("%s", epx_last_error());
    assert_string_equal(e.launcher, launcher);
    assert_int_equal(e.rank, rank);
    assert_int_equal(e.n_ranks, n_ranks);
    assert_int_equal(strncmp(e.address, host, strlen(host)), 0);
    assert_int_equal(e.address[strlen(host)], ':');
    int port = atoi(e.address + strlen(host) + 1);
    assert_in_range(port, 1024, 32767);
    if (out != NULL) *out = e;
}

static void no_launcher(void **state) {
    (void)state;
    clear();
    assert_says("OMPI_COMM_WORLD_RANK");
    set("PMI_RANK", "0"); /* no size */
    assert_says("PMI_SIZE");
}

static void open_mpi(void **state) {
    (void)state;
    epx_boot_env_t a, b;
    clear();
    set("OMPI_COMM_WORLD_RANK", "2");
    set("OMPI_COMM_WORLD_SIZE", "4");
    set("OMPI_COMM_WORLD_LOCAL_SIZE", "4");
    set("OMPI_MCA_orte_hnp_uri", "77.0;tcp://10.1.2.3,192.168.7.1:45987");
    assert_found("Open MPI", 2, 4, "127.0.0.1", &a);
    set("OMPI_COMM_WORLD_RANK", "3");
    assert_found("Open MPI", 3, 4, "127.0.0.1", &b);
    assert_string_equal(a.address, b.address); /* all ranks of a job meet at one place */
    set("OMPI_MCA_orte_hnp_uri", "78.0;tcp://10.1.2.3,192.168.7.1:45988");
    assert_found("Open MPI", 3, 4, "127.0.0.1", &b);
    assert_string_not_equal(a.address, b.address); /* another job: another place */
    set("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
    assert_found("Open MPI", 3, 4, "10.1.2.3", NULL);
    unsetenv("OMPI_MCA_orte_hnp_uri");
    assert_says("EPX_INIT_ADDR");
    set("EPX_INIT_ADDR", "node7:5000");
    assert_found("Open MPI", 3, 4, "node7", NULL);
}

static void pmi(void **state) {
    (void)state;
    epx_boot_env_t a, b;
    clear();
    set("PMI_RANK", "0");
    set("PMI_SIZE", "2");
    assert_says("EPX_INIT_ADDR"); /* one host or several: unknown */
    set("MPI_LOCALNRANKS", "2");
    assert_found("PMI", 0, 2, "127.0.0.1", &a);
    set("PMI_RANK", "1");
    assert_found("PMI", 1, 2, "127.0.0.1", &b);
    assert_string_equal(a.address, b.address);
    set("PMI_RANK", "x");
    assert_says("PMI_RANK is \"x\"");
    set("PMI_RANK", "-1");
    assert_says("PMI_RANK is \"-1\"");
    set("PMI_RANK", "0");
    set("PMI_SIZE", "99999999999");
    assert_says("PMI_SIZE is \"99999999999\"");
    set("PMI_SIZE", "1");
    unsetenv("MPI_LOCALNRANKS");
    assert_found("PMI", 0, 1, "127.0.0.1", NULL);
}

static void slurm(void **state) {
    (void)state;
    static const struct {
        const char *list, *first;
    } cases[] = {{"node[01-04,07]", "node01"}, {"a,b", "a"}, {"gpu-3", "gpu-3"}, {"n[7,9]", "n7"}, {"n[12]", "n12"}};
    clear();
    set("SLURM_PROCID", "1");
    set("SLURM_NTASKS", "8");
    set("SLURM_NNODES", "2");
    set("SLURM_JOB_ID", "123");
    assert_says("EPX_INIT_ADDR");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        set("SLURM_STEP_NODELIST", cases[i].list);
        assert_found("Slurm", 1, 8, cases[i].first, NULL);
    }
    set("SLURM_NNODES", "1");
    assert_found("Slurm", 1, 8, "127.0.0.1", NULL);
    set("OMPI_COMM_WORLD_RANK", "0"); /* mpirun inside a Slurm job: mpirun started this process */
    set("OMPI_COMM_WORLD_SIZE", "1");
    assert_found("Open MPI", 0, 1, "127.0.0.1", NULL);
}

static void config_and_launcher_agree(void **state) {
    (void)state;
    epx_world_config_t c;
    epx_world_t *w = NULL;
    clear();
    set("PMI_RANK", "0");
    set("PMI_SIZE", "1");
    epx_world_config_init(&c);
    c.bootstrap = "env";
    c.n_ranks = 2;
    assert_int_equal(epx_world_create(&c, &w), EPX_ERR_ARG);
    assert_non_null(strstr(epx_last_error(), "n_ranks is 2 and PMI says 1"));
    c.n_ranks = -1;
    c.rank = 1;
    assert_int_equal(epx_world_create(&c, &w), EPX_ERR_ARG);
    c.rank = 0;
    if (epx_world_create(&c, &w) != EPX_OK) fail_msg("%s", epx_last_error());
    assert_int_equal(epx_world_size(w), 1);
    epx_world_destroy(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_launcher),
        cmocka_unit_test(open_mpi),
        cmocka_unit_test(pmi),
        cmocka_unit_test(slurm),
        cmocka_unit_test(config_and_launcher_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
