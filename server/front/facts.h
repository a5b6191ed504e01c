/* Lists of facts about a node, lines "name\tvalue\n" in any order, and what differs between two of them. Pure. */
#ifndef EPX_SERVER_FRONT_FACTS_H
#define EPX_SERVER_FRONT_FACTS_H

#include "base/status.h"
#include "base/str.h"

/* Append "NAME is VALUE on node 0 and VALUE on WHO" for every fact of node 0's list that the other has with another value or not
 * at all, and the reverse, separated by "; ". Nothing where they are the same. */
epx_status_t epx_facts_compare(const char *node_0, const char *other, const char *who, epx_str_t *out);

#endif
