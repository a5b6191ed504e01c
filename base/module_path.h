/* Where a module that is opened at run time lies. */
#ifndef EPX_BASE_MODULE_PATH_H
#define EPX_BASE_MODULE_PATH_H

#include <stddef.h>

/* Path of module `file` for dlopen(): the value of the environment variable `env`; else the file beside the program or library
 * that this code is in, in ../lib or ../lib/epx from there; else `file` itself, for the loader to find. Never fails. */
void epx_module_path(const char *env, const char *file, char *out, size_t n_out);

#endif
