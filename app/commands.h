/* The subcommands. Each gets checked settings and returns the exit code; messages go to standard error. */
#ifndef EPX_APP_COMMANDS_H
#define EPX_APP_COMMANDS_H

#include "app/session.h"
#include "app/settings.h"

int epx_command_serve(const epx_settings_t *o);
int epx_command_generate(const epx_settings_t *o);
int epx_command_info(const epx_settings_t *o);
int epx_command_demo(const epx_settings_t *o);
int epx_command_eval(const epx_settings_t *o);
/* Commands with flags of their own; argv[1] is the command. */
int epx_command_bench(int argc, char **argv);
int epx_command_bench_a2a(int argc, char **argv);
int epx_command_bench_serve(int argc, char **argv);
int epx_command_bench_ops(int argc, char **argv);
int epx_command_plan(int argc, char **argv);
int epx_command_man(int argc, char **argv);
int epx_command_completion(int argc, char **argv);

/* Serve HTTP on a started session until a signal or the loss of the ranks. search: if the port is taken use the next free one.
 * The ranks are stopped afterwards. Returns the exit code. */
int epx_serve_session(epx_session_t *s, int search);
/* `epx serve` of node 1 and above: ranks without HTTP. Returns the exit code. */
int epx_serve_node(const epx_settings_t *o);
struct epx_http;
/* HTTP for a client in this process, on a free port of 127.0.0.1 and without a key. Pair with epx_serve_close, which stops the
 * ranks. */
epx_status_t epx_serve_open(epx_session_t *s, struct epx_http **out_h, int *out_port);
void epx_serve_close(epx_session_t *s, struct epx_http *h);
/* Print this thread's error message after "epx: " and return exit code 1. */
int epx_print_error(void);

#endif
