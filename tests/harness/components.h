/* Which backends and transports the contract suite covers: whatever the library says is available. */
#ifndef EPX_TESTS_HARNESS_COMPONENTS_H
#define EPX_TESTS_HARNESS_COMPONENTS_H

enum { TH_MAX_COMPONENTS = 16 };

/* Names of the available components of a kind ("backend", "transport"), in the library's order. Returns how many. With
 * EPX_EMULATED_HOSTS in the environment only what works over several hosts, without it only what works on one. */
int th_components(const char *kind, const char *out_names[TH_MAX_COMPONENTS]);
/* Does this backend refuse ranks in several processes? */
int th_needs_one_process(const char *backend);
/* EPX_CONTRACT_SEED of the environment, or a fixed seed. */
unsigned long long th_seed(void);
void th_print_seed(void);

#endif
