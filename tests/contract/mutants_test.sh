#!/bin/sh
# Each planted mistake of the library (lib/spi/mutant.h) must make the contract suite fail, and no mistake must let it pass.
# Usage: mutants_test.sh BUILD_DIR SOURCE_DIR [NAME...]   Prints which program caught which mistake. Needs -DEPX_MUTANTS=ON.
set -u
bin=$1/tests/contract src=$2
shift 2
names=${*:-$(sed -n 's/^ \* | \([a-z_]*\) *|.*/\1/p' "$src/lib/spi/mutant.h" | grep -v '^name$')}
[ -n "$names" ] || { echo "no mutants are listed in $src/lib/spi/mutant.h"; exit 1; }
out=$(mktemp)
trap 'rm -f "$out"' EXIT

# The quick subset, most telling first. A program that hangs past its limit has failed.
quick() {
    echo "reuse threads 60"
    echo "matrix threads pairwise 6"
    echo "groups threads group_allgather"
    echo "refuse mismatch_names_the_field"
    echo "channels threads"
    echo "recover threads"
    echo "matrix wrapper:fault pairwise 6"
    echo "late:recover threads abort_and_recover"
    echo "faults threads timeout_names_phase_and_peer"
}

# run PROGRAM ARGUMENTS...; late:PROGRAM takes the wire that delivers late, between two emulated hosts.
run() {
    program=$1
    shift
    case $program in
    late:*) EPX_EMULATED_HOSTS=2 EPX_MODULE_DIR=$bin/late timeout 60 "$bin/contract_${program#late:}" "$@" ;;
    *) timeout 60 "$bin/contract_$program" "$@" ;;
    esac
}

# first_failure NAME: the program that fails under the mistake NAME ("" without a mistake); nothing when all pass.
first_failure() {
    quick | while read -r program args; do
        # shellcheck disable=SC2086
        (EPX_MUTANT=$1 EPX_CONTRACT_TIMEOUT_MS=3000 && export EPX_MUTANT EPX_CONTRACT_TIMEOUT_MS && run $program $args) >"$out" 2>&1 && continue
        echo "contract_$program $args"
        break
    done
}

# The first message of the failed program; what peers say about a rank that gave up comes last.
why() {
    { grep -E '\.c:[0-9]+:|HUNG' "$out" | grep -v 'aborted the plan'; grep -E '\.c:[0-9]+:' "$out"; } | sed 's/^ *//' | head -1
}

n_bad=0 n=0
caught=$(first_failure "")
[ -z "$caught" ] || { cat "$out"; echo "without a planted mistake: FAILED in $caught"; exit 1; }
for name in $names; do
    caught=$(first_failure "$name")
    n=$((n + 1))
    if [ -n "$caught" ]; then
        echo "$name: caught by $caught: $(why | cut -c1-200)"
    else
        echo "$name: NOT CAUGHT"
        n_bad=$((n_bad + 1))
    fi
done
echo "$((n - n_bad)) of $n planted mistakes caught"
[ "$n_bad" -eq 0 ] && [ "$n" -ge 8 ]
