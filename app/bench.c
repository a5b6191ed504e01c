/* `epx bench WHAT`. */
#include <stdio.h>
#include <string.h>

#include "app/commands.h"

int epx_command_bench(int argc, char **argv) {
    const char *what = argc >= 3 ? argv[2] : "";
    if (strcmp(what, "a2a") == 0) return epx_command_bench_a2a(argc, argv);
    if (strcmp(what, "ops") == 0) return epx_command_bench_ops(argc, argv);
    if (strcmp(what, "serve") == 0) return epx_command_bench_serve(argc, argv);
    int help = strcmp(what, "--help") == 0 || strcmp(what, "-h") == 0;
    fprintf(help ? stdout : stderr, "epx bench: what to measure? There are:\n"
                                    "  a2a        dispatch and combine between ranks of this machine\n"
                                    "  ops        the engine's operations against what the machine can do\n"
                                    "  serve      a server of language models: throughput and latencies\n"
                                    "`epx bench WHAT --help` lists the flags.\n");
    return help ? 0 : 2;
}
