#!/bin/sh
# docs/api.md against the library: every exported call has a row in a table there, with its errors, and stands in an example; every
# example compiles without a warning, runs, and prints what the text block behind it says.
# Usage: api_docs_test.sh SOURCE_DIR BUILD_DIR
set -eu
src=$1 build=$2
doc=$src/docs/api.md
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# Blocks in order: N.c, and N.want for a text block behind it.
awk -v dir="$tmp" '
/^```c$/ { file = dir "/" ++n ".c"; next }
/^```text$/ { file = dir "/" n ".want"; next }
/^```/ { file = ""; next }
file != "" { print > file }' "$doc"

bad=0
while read -r call; do
    row=$(grep "^| \`$call(" "$doc" || true)
    [ "$(printf '%s\n' "$row" | grep -c .)" = 1 ] || { echo "docs/api.md: $call has no row of its own in a table"; bad=1; continue; }
    printf '%s\n' "$row" | grep -q '^| [^|]* | [^|]*[a-z][^|]* | [^|]*[a-zA-Z][^|]* |$' || { echo "docs/api.md: the row of $call lacks a cell: $row"; bad=1; }
    grep -q "\<$call(" "$tmp"/*.c || { echo "docs/api.md: $call is in no example"; bad=1; }
done <"$src/tests/contract/exports.txt"
for call in $(grep -o '^| `epx_[a-z_]*(' "$doc" | tr -d '|` ('); do
    grep -qx "$call" "$src/tests/contract/exports.txt" || { echo "docs/api.md: $call is not exported"; bad=1; }
done

n=0
for example in "$tmp"/*.c; do
    n=$((n + 1))
    name=${example%.c}
    [ -s "$name.want" ] || { echo "docs/api.md: no output is given for example $n"; bad=1; continue; }
    "${CC:-cc}" -std=c11 -Wall -Wextra -Werror -I "$src/include" "$example" "$build/lib/libepx.a" -pthread -ldl -lm -o "$name"
    timeout 30 "$name" >"$name.out" 2>"$name.err" || { echo "docs/api.md: example $n failed"; cat "$name.err"; bad=1; continue; }
    cmp -s "$name.out" "$name.want" || { echo "docs/api.md: example $n printed"; cat "$name.out"; bad=1; }
done
[ $n -ge 2 ] || { echo "docs/api.md: $n examples were found"; bad=1; }
[ $bad = 0 ] && echo "docs/api.md: $(grep -c . "$src/tests/contract/exports.txt") calls, $n examples"
exit $bad
