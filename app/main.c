/* The epx program: chooses the subcommand, or becomes a rank when started by the front. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "app/commands.h"
#include "app/page.h"
#include "base/log.h"
#include "epx/epx.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

static const struct {
    const char *name, *purpose;
    int (*run)(const epx_settings_t *o);
} commands[EPX_CMD_COUNT] = {
    [EPX_CMD_SERVE] = {"serve", "serve a model over HTTP", epx_command_serve},
    [EPX_CMD_GENERATE] = {"generate", "answer one prompt on standard output", epx_command_generate},
    [EPX_CMD_INFO] = {"info", "say what this machine and this build can do", epx_command_info},
    [EPX_CMD_DEMO] = {"demo", "two ranks, one word problem, then a server", epx_command_demo},
    [EPX_CMD_EVAL] = {"eval", "measure a model on a text, or compare it with reference values", epx_command_eval},
};
/* Commands that read their own flags. */
static const struct {
    const char *name, *purpose;
    int (*run)(int argc, char **argv);
} tools[] = {{"bench", "measure a server, or the exchange or the operations on this machine", epx_command_bench},
             {"plan", "compute what an exchange costs on any number of ranks", epx_command_plan},
             {"completion", "print the completion script of bash, zsh or fish", epx_command_completion},
             {"man", "print the manual page", epx_command_man}};
enum { N_TOOLS = sizeof tools / sizeof tools[0] };
static const char *const names[] = {"serve", "generate", "info", "demo", "eval", "bench", "plan", "completion", "man", NULL};

/* ---- log lines ---- */

static const char *const levels[] = {"error", "warning", "info", "debug", NULL};
static int log_level = -1;

static void print_log(void *ctx, int level, const char *message) {
    (void)ctx;
    if (level <= log_level) fprintf(stderr, "epx: %s: %s\n", levels[level], message);
}

/* Errors reach the user through statuses; log lines are for those who ask. */
static int set_log(void) {
    const char *want = getenv("EPX_LOG");
    if (want == NULL || *want == 0) return 0;
    for (int i = 0; levels[i]; i++)
        if (strcmp(levels[i], want) == 0) log_level = i;
    if (log_level < 0) {
        fprintf(stderr, "epx: EPX_LOG=%s: legal values: error, warning, info, debug\n", want);
        return EXIT_USAGE;
    }
    epx_log_set_sink(print_log, NULL);
    epx_set_log(print_log, NULL);
    return 0;
}

/* A closed 0, 1 or 2 would be reused for the next socket or file, and output would go there. */
static void open_standard_files(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_WRONLY : O_RDONLY) != fd) exit(EXIT_FAILED);
}

/* ---- commands ---- */

int epx_print_error(void) {
    fflush(stdout);
    fprintf(stderr, "epx: %s\n", epx_error_message());
    return EXIT_FAILED;
}

static void print_usage(FILE *out) {
    fprintf(out, "epx %s: Mixture-of-Experts language models on expert-parallel ranks\n\nusage: epx COMMAND [OPTION]...\n\n",
            epx_version());
    for (int c = 0; c < EPX_CMD_COUNT; c++) fprintf(out, "  %-10s %s\n", commands[c].name, commands[c].purpose);
    for (int c = 0; c < N_TOOLS; c++) fprintf(out, "  %-10s %s\n", tools[c].name, tools[c].purpose);
    fprintf(out, "\n`epx COMMAND --help` describes a command; `epx --version` prints the version.\n");
}

/* ---- the manual ---- */

static int print_text(epx_status_t s, epx_str_t *text) {
    int code = EXIT_DONE;
    if (s < 0) code = epx_print_error();
    else if (fputs(epx_str_z(text), stdout) < 0 || fflush(stdout) != 0) code = EXIT_FAILED;
    epx_str_fini(text);
    return code;
}

int epx_command_man(int argc, char **argv) {
    epx_str_t text = {0};
    if (argc > 2) {
        fprintf(stderr, "epx man: unexpected argument \"%s\"; it takes none. To read it: epx man | man -l -\n", argv[2]);
        return EXIT_USAGE;
    }
    return print_text(epx_manual_roff(&text), &text);
}

int epx_command_completion(int argc, char **argv) {
    epx_str_t text = {0};
    epx_status_t s = argc == 3 ? epx_manual_completion(argv[2], &text) : EPX_ERR_ARG;
    if (s != EPX_ERR_ARG) return print_text(s, &text);
    fprintf(stderr, "epx completion: which shell? Legal: bash, zsh, fish. For this bash: source <(epx completion bash)\n");
    return EXIT_USAGE;
}

static int find(const char *const *list, const char *word) {
    for (int i = 0; list[i]; i++)
        if (strcmp(list[i], word) == 0) return i;
    return -1;
}

static int refuse_command(const char *word) {
    fprintf(stderr,
            "epx: unknown command \"%s\"; did you mean %s? There are: serve, generate, info, demo, eval, bench, "
            "plan, completion, man\n",
            word, epx_options_nearest(names, word));
    return EXIT_USAGE;
}

/* One line each, all at once. */
static int print_problems(int command, const epx_str_t *problems) {
    for (const char *p = problems->data, *end; *p && (end = strchr(p, '\n')); p = end + 1)
        fprintf(stderr, "epx %s: %.*s\n", commands[command].name, (int)(end - p), p);
    fprintf(stderr, "`epx %s --help` lists all flags.\n", commands[command].name);
    return EXIT_USAGE;
}

static void init_settings(int command, epx_settings_t *o) {
    epx_settings_init(o);
    if (command != EPX_CMD_DEMO) return;
    o->tp = o->dp = 2;
    o->enable_dp_attention = 1;
    o->moe_a2a_backend = "pplx";
}

/* The ranks take the level from the environment, as this process does. */
static int choose_log(int command, const epx_settings_t *o) {
    const char *want = o->log_level ? o->log_level : command == EPX_CMD_SERVE ? "info" : NULL, *set = getenv("EPX_LOG");
    if (want == NULL || (set && *set)) return 0;
    setenv("EPX_LOG", want, 1);
    return set_log();
}

static void print_notes(const epx_settings_t *o) {
    epx_str_t notes = {0};
    if (epx_settings_notes(o, &notes) >= 0)
        for (const char *p = epx_str_z(&notes), *end; *p && (end = strchr(p, '\n')); p = end + 1)
            fprintf(stderr, "epx: note: %.*s\n", (int)(end - p), p);
    epx_str_fini(&notes);
}

static int start_command(int command, const epx_settings_t *o) {
    int code = choose_log(command, o);
    if (code) return code;
    if (command == EPX_CMD_SERVE) print_notes(o);
    return commands[command].run(o);
}

/* `eval WHAT [FILE]` has words before the options. Returns the index of the first option. */
static int take_words(int command, int argc, char **argv, epx_settings_t *o) {
    int at = 2;
    if (command != EPX_CMD_EVAL) return at;
    if (at < argc && argv[at][0] != '-') o->eval_what = argv[at++];
    if (at < argc && argv[at][0] != '-') o->eval_file = argv[at++];
    return at;
}

static int run_command(int command, int argc, char **argv) {
    epx_settings_t o;
    epx_str_t problems = {0};
    epx_status_t s;
    int code;
    init_settings(command, &o);
    s = epx_options_parse(&epx_settings_table, command, take_words(command, argc, argv, &o), argc, argv, &o, &problems);
    if (s >= 0 && o.help) {
        epx_str_fini(&problems);
        return epx_page_print_help(epx_settings_page((epx_command_t)command));
    }
    if (s >= 0) s = epx_settings_validate(&o, (epx_command_t)command, &problems);
    if (s < 0) code = epx_print_error();
    else code = problems.n_bytes ? print_problems(command, &problems) : start_command(command, &o);
    epx_str_fini(&problems);
    return code;
}

int main(int argc, char **argv) {
    int command, code;
    open_standard_files();
    code = set_log();
    if (code) return code;
    if (argc == 3 && strcmp(argv[1], EPX_WORKER_ARGUMENT) == 0) return epx_worker_main(atoi(argv[2]));
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return EXIT_DONE;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("epx %s\n", epx_version());
        return EXIT_DONE;
    }
    command = find(names, argv[1]);
    if (command >= EPX_CMD_COUNT) return tools[command - EPX_CMD_COUNT].run(argc, argv);
    return command < 0 ? refuse_command(argv[1]) : run_command(command, argc, argv);
}
