#!/bin/sh
# scripts/check-layers must find each kind of wrong include, and name it. Usage: layers_test.sh SOURCE_DIR
set -eu
check=$1/scripts/check-layers
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
n_bad=0

# expect WANTED FILE INCLUDE_LINE TARGET: a tree with FILE including TARGET; WANTED is "clean" or "bad".
expect() {
    rm -rf "$tmp/t"
    mkdir -p "$tmp/t/$(dirname "$2")" "$tmp/t/$(dirname "$4")"
    : >"$tmp/t/$4"
    printf '%s\n' "$3" >"$tmp/t/$2"
    got=clean
    "$check" "$tmp/t" >"$tmp/out" || got=bad
    [ "$got" = "$1" ] && return 0
    echo "$2 with $3: $got, wanted $1"
    n_bad=$((n_bad + 1))
}

expect clean lib/core/plan.c '#include "lib/spi/a2a.h"' lib/spi/a2a.h
expect clean lib/core/plan.c '#include "spi/a2a.h"' lib/spi/a2a.h
expect clean lib/core/registry.c '#include "lib/a2a/a2a.def"' lib/a2a/a2a.def
expect clean engine/runtime/step.c '#include "epx/epx.h"' include/epx/epx.h
expect clean engine/sched/a.c '#include "engine/kv/kv.h"' engine/kv/kv.h
expect clean server/a.c '#include "engine/runtime/rank.h"' engine/runtime/rank.h
expect clean base/status.h '#include "epx/epx_status.h"' include/epx/epx_status.h
expect bad lib/core/plan.c '#include "lib/a2a/onesided/onesided.h"' lib/a2a/onesided/onesided.h
expect bad lib/core/plan.c '#include "lib/a2a/a2a.def"' lib/a2a/a2a.def
expect bad lib/a2a/ref/ref.c '#include "lib/a2a/onesided/onesided.h"' lib/a2a/onesided/onesided.h
expect bad lib/a2a/ref/ref.c '#include "../onesided/onesided.h"' lib/a2a/onesided/onesided.h
expect bad lib/a2a/ref/ref.c '#include "lib/transport/shm/shm.h"' lib/transport/shm/shm.h
expect bad lib/a2a/ref/ref.c '#include "lib/core/plan.h"' lib/core/plan.h
expect bad lib/spi/layout.c '#include "lib/core/plan.h"' lib/core/plan.h
expect bad lib/spi/layout.c '#include <pthread.h>' lib/spi/layout.h
expect bad engine/model/m.c '#include "lib/core/plan.h"' lib/core/plan.h
expect bad engine/sched/a.c '#include "epx/epx.h"' include/epx/epx.h
expect bad engine/sched/a.c '#include <epx/epx.h>' include/epx/epx.h
expect bad engine/sched/a.c '#include <sys/socket.h>' engine/sched/a.h
expect bad engine/tokenizer/a.c '#include "base/clock.h"' base/clock.h
expect bad engine/runtime/a.c '#include <microhttpd.h>' engine/runtime/a.h
expect bad engine/ops/ops.c '#include "engine/model/model.h"' engine/model/model.h
expect bad engine/model/m.c '#include "server/http/http.h"' server/http/http.h
expect bad server/a.c '#include "lib/core/plan.h"' lib/core/plan.h
expect bad server/a.c '#include "app/main.h"' app/main.h
expect bad base/str.c '#include "epx/epx.h"' include/epx/epx.h
expect bad include/epx/epx.h '#include "base/str.h"' base/str.h
expect bad base/str.c '#include "base/none.h"' base/str.h
expect bad tests/a.c '#include "lib/core/plan.c"' lib/core/plan.c
[ "$n_bad" -eq 0 ] || exit 1
echo "check-layers finds what it must"
