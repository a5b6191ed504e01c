#!/bin/sh
# Two hosts emulated by two network namespaces that a veth pair joins, each with its own host name, IPC and /dev/shm.
# matrix: the pairwise contract cases against the oracle with 2, 3 and 4 ranks over both hosts.
# cut:    the link goes down during exchanges; every rank gets its named error within the deadline.
# kill:   a rank on the other host is killed; every rank gets its named error.
# recover: of two ranks on each host one is killed; the other three, on both hosts, mask it, recover and go on.
# split:  the link goes down; the ranks of each host mask those of the other, recover and go on.
# serve:  `epx serve` over both hosts (tp 2, dp 2): answers equal one rank's, also with attention shared across hosts; then the link
#         goes down and a request ends with an error that names the other host, within the deadline, and so does each server.
# Usage: hosts_test.sh BUILD_DIR matrix|cut|kill|recover|split|serve.  Exit 77: not root, or a tool or UCX is missing.
set -eu
build=$1 what=$2
here=$(cd "$(dirname "$0")" && pwd)
model=$here/../../models/tinymoe-math
skip() { echo "skipped: $*"; exit 77; }
if [ "$(id -u)" != 0 ]; then # the check of a commit may use sudo, a developer's `make test` does not
    [ "${CI:-}" = true ] && sudo -n true 2>/dev/null && exec sudo -n CI=true sh "$0" "$@"
    skip "two emulated hosts need root"
fi
for tool in ip unshare mount; do command -v $tool >/dev/null || skip "$tool is not installed"; done
[ -e "$build/lib/libepx_ucx.so" ] || skip "libepx_ucx.so was not built (libucx-dev)"
tmp=$(mktemp -d)
a=epxA$$ b=epxB$$ pids=
cleanup() {
    for p in $pids; do kill -9 "$p" 2>/dev/null || true; done
    ip netns del $a 2>/dev/null || true
    ip netns del $b 2>/dev/null || true
    rm -rf "$tmp"
}
trap cleanup EXIT
{ ip netns add $a && ip netns add $b && ip link add ep0 netns $a type veth peer name ep0 netns $b; } 2>"$tmp/why" ||
    skip "no network namespaces here: $(cat "$tmp/why")"
for n in "$a 1" "$b 2"; do
    ip -n "${n% *}" addr add "10.213.7.${n#* }/24" dev ep0
    ip -n "${n% *}" link set ep0 up
    ip -n "${n% *}" link set lo up
done
for n in $a $b; do # a moment until the carrier is there
    i=0
    until ip -n $n -br link show ep0 | grep -q ' UP '; do
        i=$((i + 1))
        [ $i -lt 100 ] || skip "the veth pair in $n does not come up"
        sleep 0.05
    done
done
EPX_MODULE_DIR=$build/lib EPX_JOIN_TOKEN=token-of-$$ UCX_TLS=tcp UCX_NET_DEVICES=ep0
export EPX_MODULE_DIR EPX_JOIN_TOKEN UCX_TLS UCX_NET_DEVICES
unset EPX_EMULATED_HOSTS EPX_INIT_ADDR

# on NAMESPACE HOSTNAME COMMAND...: the pid is the command's own
on() {
    ns=$1 name=$2
    shift 2
    exec ip netns exec "$ns" unshare --uts --ipc --mount sh -c 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; exec "$@"' "$name" "$@"
}
# start RANK N COMMAND...: the first half of the ranks on nodea, the rest on nodeb
start() {
    rank=$1 n=$2
    shift 2
    if [ $((rank * 2)) -lt "$n" ]; then host="$a nodea"; else host="$b nodeb"; fi
    # shellcheck disable=SC2086
    on $host "$@" >"$tmp/out.$rank" 2>&1 &
    pids="$pids $!"
}
show() { for f in "$tmp"/out.*; do echo "-- ${f##*/}"; cat "$f"; done >&2; }
# Wait for all; the exit codes must be those given in order ("any": do not look).
await() {
    bad=0
    for p in $pids; do
        code=0
        wait "$p" || code=$?
        [ "$1" = any ] || [ "$code" = "$1" ] || bad=1
        shift
    done
    pids=
    [ $bad = 0 ] || { show; exit 1; }
}

run_matrix() {
    for n in 2 3 4; do
        codes= rank=0
        while [ $rank -lt $n ]; do
            start $rank $n timeout 50 "$build/tests/contract/contract_matrix" remote tcp:10.213.7.1:$((7000 + n)) $rank $n
            rank=$((rank + 1)) codes="$codes 0"
        done
        # shellcheck disable=SC2086
        await $codes
        cat "$tmp"/out.*
    done
}

# $2 (3) ranks, the first half, rounded up, on nodea; $1 breaks something once all have exchanged. lost_N: whom rank N then takes for dead.
run_broken() {
    rank=0 n=${2:-3}
    while [ $rank -lt "$n" ]; do
        eval "lost=\${lost_$rank:-}"
        # shellcheck disable=SC2086,SC2154
        start $rank "$n" timeout 50 "$build/tests/hosts/hosts_cut" tcp:10.213.7.1:7010 $rank "$n" "$tmp" $lost
        rank=$((rank + 1))
    done
    i=0
    while [ "$(find "$tmp" -name 'ready.*' | wc -l)" -lt "$n" ]; do
        i=$((i + 1))
        [ $i -lt 300 ] || { show; exit 1; }
        sleep 0.1
    done
    $1
}
cut_link() { ip -n $a link set ep0 down; }
kill_last() {
    last=${pids##* } # `timeout` on nodeb; its child is the rank
    kill -9 $(cat "/proc/$last/task/$last/children")
}
names_nodeb() {
    grep -h '^status' "$tmp"/out.0 "$tmp"/out.1
    grep -q 'rank 2 (pid [0-9]* on nodeb)' "$tmp/out.0" && grep -q 'rank 2 (pid [0-9]* on nodeb)' "$tmp/out.1" || { show; exit 1; }
}

# serve_hosts.py on nodea is node 0 and its client, epx on nodeb is node 1; once per layout, the last time until the link is cut.
serve_pair() { # FLAGS what-to-do
    where="--nnodes 2 --dist-init-addr 10.213.7.1:7020 --dist-timeout 30 --threads 1"
    rm -f "$tmp"/ready.* "$tmp"/out.*
    # shellcheck disable=SC2086
    on $b nodeb timeout 70 "$build/app/epx" serve --model-path "$model" $1 $where --node-rank 1 >"$tmp/out.1" 2>&1 &
    pids=$!
    # shellcheck disable=SC2086
    on $a nodea timeout 70 python3 "$here/serve_hosts.py" "$build/app/epx" "$model" "$tmp" $2 $1 $where --node-rank 0 >"$tmp/out.0" 2>&1 &
    pids="$pids $!"
}
run_serve() {
    command -v python3 >/dev/null || skip "python3 is not installed"
    common="--tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend pplx --watchdog-timeout 3"
    serve_pair "--tp 2" answer
    await 0 0
    cat "$tmp/out.0"
    serve_pair "$common" cut
    i=0
    while [ ! -e "$tmp/ready.0" ]; do
        i=$((i + 1))
        [ $i -lt 600 ] || { show; exit 1; }
        sleep 0.1
    done
    cut_link
    await 1 0
    cat "$tmp/out.0"
    grep -q 'node 0 at 10.213.7.1:7020 has been silent for\|rank 0 ' "$tmp/out.1" || { show; exit 1; }
    tail -n 1 "$tmp/out.1"
}

case $what in
matrix) run_matrix ;;
cut)
    run_broken cut_link
    await 0 0 0
    names_nodeb
    grep -h '^status' "$tmp/out.2"
    grep -q 'on nodea)' "$tmp/out.2" || { show; exit 1; }
    ;;
kill)
    run_broken kill_last
    await 0 0 any
    names_nodeb
    ;;
recover)
    lost_0=3 lost_1=3 lost_2=3
    run_broken kill_last 4
    await 0 0 0 any
    grep -h '^status\|^recovered' "$tmp"/out.?
    [ "$(cat "$tmp"/out.? | grep -c '^recovered')" = 3 ] || { show; exit 1; }
    ;;
split)
    lost_0="2 3" lost_1="2 3" lost_2="0 1" lost_3="0 1"
    run_broken cut_link 4
    await 0 0 0 0
    grep -h '^status\|^recovered' "$tmp"/out.?
    [ "$(cat "$tmp"/out.? | grep -c '^recovered')" = 4 ] || { show; exit 1; }
    ;;
serve) run_serve ;;
*) echo "unknown test '$what'; legal: matrix, cut, kill, recover, split, serve" >&2 && exit 2 ;;
esac
