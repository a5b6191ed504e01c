/* `epx bench a2a`: options, jobs, starting the ranks, output. The parent makes the run file and waits; without peers the ranks
 * are forked, with peers mpirun starts the peer program, whose ranks run the library's variants too. */
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "app/bench_a2a.h"
#include "app/bench_cuda.h"
#include "app/commands.h"
#include "app/page.h"

typedef struct {
    int help;
    int64_t ranks, blocks, block_ms, seed;
    const char *device, *shapes, *tokens, *skews, *backends, *combines, *layouts, *inputs, *dtypes, *peers, *json, *svg, *tune;
} settings_t;

#define AT(field) offsetof(settings_t, field)
static const epx_option_t options[] = {
    {"device", NULL, EPX_OPTION_CHOICE, AT(device), 0, -1, "cpu|cuda", NULL, 1, NULL,
     "cpu (default), or cuda, which has flags of its own: `epx bench a2a --device cuda --help`."},
    {"ranks", NULL, EPX_OPTION_INT, AT(ranks), 1, BENCH_MAX_RANKS, NULL, NULL, 1, "N",
     "Ranks, one process each, pinned to the cores in turn. Default 2."},
    {"shapes", NULL, EPX_OPTION_TEXT, AT(shapes), 0, -1, NULL, NULL, 1, "LIST",
     "Shapes ExKxH (experts, top-k, hidden), comma separated. Default 128x8x2048,256x8x7168,16x4x256."},
    {"tokens", NULL, EPX_OPTION_TEXT, AT(tokens), 0, -1, NULL, NULL, 1, "LIST",
     "Tokens a rank, comma separated. Default 1,8,32,128,512."},
    {"skews", NULL, EPX_OPTION_TEXT, AT(skews), 0, -1, NULL, NULL, 1, "LIST",
     "uniform, zipf (exponent 1 over experts), hot (every token to rank 0). Default uniform."},
    {"backends", NULL, EPX_OPTION_TEXT, AT(backends), 0, -1, NULL, NULL, 1, "LIST", "onesided, collective. Default both."},
    {"combines", NULL, EPX_OPTION_TEXT, AT(combines), 0, -1, NULL, NULL, 1, "LIST", "exact, prereduced. Default prereduced."},
    {"layouts", NULL, EPX_OPTION_TEXT, AT(layouts), 0, -1, NULL, NULL, 1, "LIST",
     "lists, expert-major: a row for each (token, expert). fused: the expert writes one weighted sum a (token, rank) in place "
     "(epx_plan_partials; prereduced only). Default lists,fused."},
    {"inputs", NULL, EPX_OPTION_TEXT, AT(inputs), 0, -1, NULL, NULL, 1, "LIST",
     "private (the caller's memory) and registered (rows lie in epx_plan_input()). Default both."},
    {"dtypes", NULL, EPX_OPTION_TEXT, AT(dtypes), 0, -1, NULL, NULL, 1, "LIST",
     "Rows on the wire: bf16, fp8 (cast by the library). Default bf16."},
    {"peers", NULL, EPX_OPTION_CHOICE, AT(peers), 0, -1, "auto|none|mpi|mpi-ucx|mpich", NULL, 1, NULL,
     "MPI programs in the same run, under mpirun: mpi (Open MPI), mpi-ucx (Open MPI over UCX), mpich. auto (default): mpi where "
     "it "
     "was built."},
    {"blocks", NULL, EPX_OPTION_INT, AT(blocks), 1, 1000, NULL, NULL, 1, "N",
     "Undisturbed blocks wanted of each variant. Default 10."},
    {"block-ms", NULL, EPX_OPTION_INT, AT(block_ms), 1, 1000, NULL, NULL, 1, "N", "Aimed length of a block. Default 8."},
    {"seed", NULL, EPX_OPTION_INT, AT(seed), 0, 2147483647.0, NULL, NULL, 1, "N", "Seed of rows and routing. Default 1."},
    {"json", NULL, EPX_OPTION_TEXT, AT(json), 0, -1, NULL, NULL, 1, "FILE",
     "Write one JSON object a line for each variant; - for standard output (the table then goes to standard error)."},
    {"svg", NULL, EPX_OPTION_TEXT, AT(svg), 0, -1, NULL, NULL, 1, "FILE", "Draw time against tokens."},
    {"tune", NULL, EPX_OPTION_TEXT, AT(tune), 0, -1, NULL, NULL, 1, "FILE",
     "Write which backend was faster for each shape and token count, as EPX_A2A_TABLE wants it. Needs both backends."},
    {"help", NULL, EPX_OPTION_FLAG, AT(help), 0, -1, NULL, NULL, 1, NULL, "Print this text."},
};
static const char *const commands[] = {"epx bench a2a", NULL};
static const epx_option_table_t table = {options, sizeof options / sizeof options[0], commands};

static const settings_t defaults = {.device = "cpu",
                                    .ranks = 2,
                                    .blocks = 10,
                                    .block_ms = 8,
                                    .seed = 1,
                                    .shapes = "128x8x2048,256x8x7168,16x4x256",
                                    .tokens = "1,8,32,128,512",
                                    .skews = "uniform",
                                    .backends = "onesided,collective",
                                    .combines = "prereduced",
                                    .layouts = "lists,fused",
                                    .inputs = "private,registered",
                                    .dtypes = "bf16",
                                    .peers = "auto"};

/* ---- settings to jobs ---- */

static epx_status_t check_names(const char *flag, const char *list, const char *legal, epx_str_t *problems) {
    char word[64];
    for (int i = 0; epx_options_element(list, i, word, sizeof word); i++)
        if (!epx_options_in_list(legal, word))
            EPX_TRY(epx_str_printf(problems, "--%s %s: legal values: %s\n", flag, word, legal));
    if (strlen(list) >= 64) EPX_TRY(epx_str_printf(problems, "--%s: longer than 63 characters\n", flag));
    return EPX_OK;
}

static int read_shape(const char *word, int n_ranks, bench_job_t *j) {
    char end;
    if (sscanf(word, "%dx%dx%d%c", &j->n_experts, &j->top_k, &j->hidden, &end) != 3) return 0;
    return j->n_experts >= n_ranks && j->n_experts <= 65536 && j->top_k >= 1 && j->top_k <= 16 && j->top_k <= j->n_experts &&
           j->hidden >= 8 && j->hidden <= 65536 && j->hidden % 8 == 0;
}

static int read_skew(const char *word) {
    for (int s = BENCH_UNIFORM; s <= BENCH_HOT; s++)
        if (strcmp(word, bench_skew_name((bench_skew_t)s)) == 0) return s;
    return -1;
}

static epx_status_t add_jobs(const settings_t *o, const bench_job_t *shape, bench_run_t *run, epx_str_t *problems) {
    char tokens[32], skew[32], end;
    for (int t = 0; epx_options_element(o->tokens, t, tokens, sizeof tokens); t++) {
        bench_job_t j = *shape;
        if (sscanf(tokens, "%d%c", &j.n_tokens, &end) != 1 || j.n_tokens < 1 || j.n_tokens > 65536) {
            return epx_str_printf(problems, "--tokens %s: legal values: 1 to 65536\n", tokens);
        }
        for (int s = 0; epx_options_element(o->skews, s, skew, sizeof skew); s++) {
            int k = read_skew(skew);
            if (k < 0) return EPX_OK; /* reported by check_names() */
            j.skew = (bench_skew_t)k;
            if (run->n_jobs == BENCH_MAX_JOBS) return epx_str_printf(problems, "more than %d jobs\n", BENCH_MAX_JOBS);
            run->jobs[run->n_jobs++] = j;
        }
    }
    return EPX_OK;
}

static epx_status_t check(const settings_t *o, bench_run_t *run, epx_str_t *problems) {
    char word[64];
    EPX_TRY(check_names("skews", o->skews, "uniform|zipf|hot", problems));
    EPX_TRY(check_names("backends", o->backends, "onesided|collective", problems));
    EPX_TRY(check_names("combines", o->combines, "exact|prereduced", problems));
    EPX_TRY(check_names("layouts", o->layouts, "lists|expert-major|fused", problems));
    EPX_TRY(check_names("inputs", o->inputs, "private|registered", problems));
    EPX_TRY(check_names("dtypes", o->dtypes, "bf16|fp8", problems));
    for (int i = 0; epx_options_element(o->shapes, i, word, sizeof word); i++) {
        bench_job_t j = {0};
        if (read_shape(word, (int)o->ranks, &j)) EPX_TRY(add_jobs(o, &j, run, problems));
        else
            EPX_TRY(
                epx_str_printf(problems,
                               "--shapes %s: legal: ExKxH with E at least --ranks, K 1 to 16 and at most E, H a multiple of 8 "
                               "up to 65536\n",
                               word));
    }
    return EPX_OK;
}

/* ---- the run file ---- */

static int n_cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static void fill(const settings_t *o, bench_run_t *run) {
    run->n_ranks = (int)o->ranks;
    run->n_cores = n_cores();
    run->n_blocks = (int)o->blocks;
    run->block_ns = (uint64_t)o->block_ms * 1000000u;
    run->seed = (uint64_t)o->seed;
    snprintf(run->backends, sizeof run->backends, "%s", o->backends);
    snprintf(run->combines, sizeof run->combines, "%s", o->combines);
    snprintf(run->layouts, sizeof run->layouts, "%s", o->layouts);
    snprintf(run->inputs, sizeof run->inputs, "%s", o->inputs);
    snprintf(run->dtypes, sizeof run->dtypes, "%s", o->dtypes);
    for (int i = 0; i < run->n_jobs; i++) {
        uint64_t bytes = (uint64_t)run->n_ranks * (uint64_t)run->jobs[i].n_tokens * (uint64_t)run->jobs[i].hidden * 2;
        bytes = (bytes + 4095) / 4096 * 4096;
        run->peer_area_bytes = bytes > run->peer_area_bytes ? bytes : run->peer_area_bytes;
    }
    run->file_bytes = (sizeof *run + 4095) / 4096 * 4096 + (uint64_t)run->n_ranks * run->peer_area_bytes;
}

/* Memory that the ranks open by path while this process lives; it has no name in a file system, so nothing can be left behind. */
static bench_run_t *make_file(const bench_run_t *want, char *path, size_t cap) {
    int fd = memfd_create("epx-bench", MFD_CLOEXEC);
    snprintf(path, cap, "/proc/%d/fd/%d", (int)getpid(), fd);
    bench_run_t *run = NULL;
    if (fd < 0 || ftruncate(fd, (off_t)want->file_bytes) != 0) {
        (void)epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
    } else {
        run = bench_run_map(fd, want->file_bytes);
    }
    if (run == NULL && fd >= 0) close(fd); /* else the path needs it: closed by the end of the process */
    if (run) memcpy(run, want, sizeof *run);
    return run;
}

/* ---- ranks ---- */

static int wait_ranks(const pid_t *pids, int n, bench_run_t *run) {
    int bad = 0, status;
    for (int left = n; left > 0; left--) {
        pid_t pid = wait(&status);
        if (pid < 0) return 1;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
        bad = 1;
        if (WIFSIGNALED(status)) (void)bench_fail(run, "a rank was ended by signal %d", WTERMSIG(status));
        for (int i = 0; i < n && WIFSIGNALED(status); i++)
            if (pids[i] != pid) kill(pids[i], SIGTERM);
    }
    return bad;
}

static int run_forked(bench_run_t *run) {
    pid_t pids[BENCH_MAX_RANKS], parent = getpid();
    for (int i = 0; i < run->n_ranks; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(getppid() == parent ? bench_rank_main(run, i, NULL) : 1);
        }
        if (pids[i] < 0) {
            for (int k = 0; k < i; k++) kill(pids[k], SIGKILL);
            return bench_fail(run, "cannot start rank %d: %s", i, strerror(errno)) || wait_ranks(pids, i, run);
        }
    }
    return wait_ranks(pids, run->n_ranks, run);
}

/* Path of the peer program of an MPI beside this one; 0 when it was not built. */
static int peer_program(int mpich, char *path, size_t cap) {
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0) return 0;
    self[n] = 0;
    *strrchr(self, '/') = 0;
    snprintf(path, cap, "%s/../bench/peers/mpi_peers%s", self, mpich ? "_mpich" : "");
    return access(path, X_OK) == 0;
}

static int run_mpi(const char *which, bench_run_t *run, char *program, char *file) {
    char n[16], *argv[32];
    int i = 0, mpich = strcmp(which, "mpich") == 0;
    static char mpirun[] = "mpirun.openmpi", hydra[] = "mpirun.mpich", f_n[] = "-n", over[] = "--oversubscribe",
                root[] = "--allow-run-as-root", bind[] = "--bind-to", none[] = "none", mca[] = "--mca",
                idle[] = "mpi_yield_when_idle", yes[] = "1", no[] = "0", pml[] = "pml", ucx[] = "ucx", tls[] = "pml_ucx_tls",
                devices[] = "pml_ucx_devices", any[] = "any"; /* else it declines where there is no InfiniBand */
    snprintf(n, sizeof n, "%d", run->n_ranks);
    argv[i++] = mpich ? hydra : mpirun;
    argv[i++] = f_n, argv[i++] = n;
    if (!mpich) {
        argv[i++] = over, argv[i++] = root, argv[i++] = bind, argv[i++] = none;
        argv[i++] = mca, argv[i++] = idle, argv[i++] = run->n_ranks > run->n_cores ? yes : no;
        if (strcmp(which, "mpi-ucx") == 0) {
            argv[i++] = mca, argv[i++] = pml, argv[i++] = ucx;
            argv[i++] = mca, argv[i++] = tls, argv[i++] = any, argv[i++] = mca, argv[i++] = devices, argv[i++] = any;
        }
    }
    argv[i++] = program, argv[i++] = file, argv[i] = NULL;
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        execvp(argv[0], argv);
        if (!mpich) argv[0] = mpirun + 0, mpirun[6] = 0, execvp(argv[0], argv); /* the name where there is only one MPI */
        _exit(127);
    }
    if (pid < 0) return bench_fail(run, "cannot start %s: %s", argv[0], strerror(errno));
    return wait_ranks(&pid, 1, run);
}

/* ---- output ---- */

static int output(const settings_t *o, const bench_run_t *run, const char *peers) {
    int to_stdout = o->json && strcmp(o->json, "-") == 0;
    FILE *text = to_stdout ? stderr : stdout, *json = to_stdout ? stdout : NULL;
    if (o->json && !to_stdout && (json = fopen(o->json, "w")) == NULL) {
        (void)epx_fail_errno(EPX_ERR_OS, errno, "%s", o->json);
        return epx_print_error();
    }
    for (int i = 0; i < run->n_jobs; i++) {
        bench_print_table(run, i, text);
        if (json) bench_print_json(run, i, peers, json);
    }
    if (json && !to_stdout && fclose(json) != 0) {
        (void)epx_fail_errno(EPX_ERR_OS, errno, "%s", o->json);
        return epx_print_error();
    }
    if (o->tune && bench_write_tune(run, o->tune) < 0) return epx_print_error();
    return o->svg && bench_write_svg(run, o->svg) < 0 ? epx_print_error() : 0;
}

static int run_all(const settings_t *o, bench_run_t *want) {
    char path[64], program[PATH_MAX + 64];
    int mpich = strcmp(o->peers, "mpich") == 0, have = peer_program(mpich, program, sizeof program), code;
    int peers = strcmp(o->peers, "none") != 0 && have;
    if (strncmp(o->peers, "mpi", 3) == 0 && !have) {
        (void)epx_fail(EPX_ERR_UNSUPPORTED, "--peers %s: %s was not built (it needs %s)", o->peers, program,
                       mpich ? "MPICH's mpicc.mpich" : "Open MPI's mpicc");
        return epx_print_error();
    }
    fill(o, want);
    want->want_peers = peers;
    bench_run_t *run = make_file(want, path, sizeof path);
    if (!run) return epx_print_error();
    if (!peers) (void)unlink(path); /* forked ranks have the mapping already; rank 0 of the peer program does it otherwise */
    code = peers ? run_mpi(o->peers, run, program, path) : run_forked(run);
    if (code || run->failed) {
        (void)epx_fail(EPX_ERR_INTERNAL, "%s", run->error[0] ? run->error : "a rank ended early");
        code = epx_print_error();
    } else {
        code = output(o, run, !peers ? "none" : strcmp(o->peers, "auto") == 0 ? "mpi" : o->peers);
    }
    (void)munmap(run, want->file_bytes);
    return code;
}

const epx_page_t epx_page_bench_a2a = {"epx bench a2a",
                                       "measure dispatch and combine between ranks on this machine",
                                       "epx bench a2a [OPTION]...",
                                       "Every rank is a process pinned to a core. Every variant is checked against the sum "
                                       "computed from its inputs, then timed in turn with "
                                       "the others; docs/benchmarks.md says how.",
                                       "    epx bench a2a\n"
                                       "    epx bench a2a --ranks 4 --shapes 256x8x7168 --tokens 8,128 --json out.jsonl\n",
                                       NULL,
                                       NULL,
                                       NULL,
                                       &table,
                                       0};

/* The last --device decides, as in the parser. */
static int on_gpus(int argc, char **argv) {
    int yes = 0;
    for (int i = 3; i < argc; i++) {
        if (strncmp(argv[i], "--device=", 9) == 0) yes = strcmp(argv[i] + 9, "cuda") == 0;
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) yes = strcmp(argv[i + 1], "cuda") == 0;
    }
    return yes;
}

int epx_command_bench_a2a(int argc, char **argv) {
    settings_t o = defaults;
    epx_str_t problems = {0};
    int code;
    if (on_gpus(argc, argv)) return epx_command_bench_cuda(argc, argv);
    bench_run_t *want = calloc(1, sizeof *want);
    if (!want) return epx_fail(EPX_ERR_NOMEM, "no memory for the jobs") < 0 ? epx_print_error() : 1;
    epx_status_t s = epx_options_parse(&table, 0, 3, argc, argv, &o, &problems);
    if (s >= 0 && o.help) code = epx_page_print_help(&epx_page_bench_a2a);
    else if (s < 0 || check(&o, want, &problems) < 0) code = epx_print_error();
    else if (problems.n_bytes) {
        fprintf(stderr, "%s`epx bench a2a --help` lists all flags.\n", problems.data);
        code = 2;
    } else code = run_all(&o, want);
    epx_str_fini(&problems);
    free(want);
    return code;
}
