#!/bin/sh
# The env bootstrap under a real launcher, and examples/mpi_callbacks.c with that launcher's MPI.
# Usage: launchers_test.sh SOURCE_DIR BUILD_DIR openmpi|mpich.  Exit 77: the launcher is not installed.
set -eu
src=$1 build=$2 kind=$3
matrix=$build/tests/contract/contract_matrix
case $kind in
openmpi) # as root, more ranks than cores, no binding: this is a test
    run="mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none" ;;
mpich) run="mpirun.mpich" ;;
*) echo "unknown launcher '$kind'; legal: openmpi, mpich" >&2 && exit 2 ;;
esac
command -v "${run%% *}" >/dev/null || { echo "skipped: ${run%% *} is not installed (package $kind)"; exit 77; }
unset EPX_INIT_ADDR EPX_JOIN_TOKEN
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# $1 ranks say "all right"
ranks() {
    n=$1
    shift
    "$@" >"$tmp/out" 2>&1 || { cat "$tmp/out" >&2; exit 1; }
    [ "$(grep -c 'all right$' "$tmp/out")" = "$n" ] || { cat "$tmp/out" >&2; exit 1; }
}
for n in 2 4; do ranks $n timeout 40 $run -n $n "$matrix" remote env -1 -1 3; done

# Two jobs at once do not meet: each has its own port.
timeout 40 $run -n 2 "$matrix" remote env -1 -1 3 >"$tmp/other" 2>&1 &
other=$!
ranks 2 timeout 40 $run -n 2 "$matrix" remote env -1 -1 3
wait $other || { cat "$tmp/other" >&2; exit 1; }

# A said address and a secret.
EPX_INIT_ADDR=localhost:$((20000 + $$ % 12000)) EPX_JOIN_TOKEN=token-of-this-test
export EPX_INIT_ADDR EPX_JOIN_TOKEN
ranks 2 timeout 40 $run -n 2 "$matrix" remote env -1 -1 3
unset EPX_INIT_ADDR EPX_JOIN_TOKEN

mpicc=mpicc.$kind
if ! command -v "$mpicc" >/dev/null || ! printf '#include <mpi.h>\nint main(void) { return 0; }\n' | "$mpicc" -x c - -o "$tmp/probe" 2>/dev/null; then
    echo "env bootstrap: passed; the example was not built: $mpicc does not work here (headers of $kind)"
    exit 0
fi
"$mpicc" -std=c11 -Wall -Wextra -Werror -I "$src/include" "$src/examples/mpi_callbacks.c" "$build/lib/libepx.a" -pthread -lm -o "$tmp/example"
timeout 40 $run -n 3 "$tmp/example" >"$tmp/out" 2>&1 || { cat "$tmp/out" >&2; exit 1; }
grep -q '^3 ranks, all results right$' "$tmp/out" || { cat "$tmp/out" >&2; exit 1; }
echo "env bootstrap and example: passed under $kind"
