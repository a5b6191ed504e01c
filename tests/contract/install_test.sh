#!/bin/sh
# Install libepx to a scratch prefix, build examples/two_threads.c there from outside, and run it: through pkg-config with
# plain cc, against the shared and the static library, and through the CMake package.
# Usage: install_test.sh SOURCE_DIR BUILD_DIR.  Exit 77: no pkg-config.
set -eu
src=$1 build=$2
command -v pkg-config >/dev/null || { echo "skipped: no pkg-config"; exit 77; }
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cmake --install "$build" --component libepx --prefix "$tmp/prefix" >"$tmp/log" || { cat "$tmp/log"; exit 1; }
mv "$tmp/prefix" "$tmp/moved" # an installation may be moved
pc=$(find "$tmp/moved" -name epx.pc)
lib=$(dirname "$(dirname "$pc")")
PKG_CONFIG_PATH=$(dirname "$pc")
export PKG_CONFIG_PATH
cp "$src/examples/two_threads.c" "$tmp"
cd "$tmp"

# shellcheck disable=SC2046
cc -std=c11 -Wall -Wextra -Werror two_threads.c $(pkg-config --cflags --libs epx) -pthread -o shared
LD_LIBRARY_PATH=$lib ./shared
readelf -d shared | grep -q 'NEEDED.*libepx\.so\.0' || { echo "the program does not need libepx.so.0"; exit 1; }

# shellcheck disable=SC2046
cc -std=c11 two_threads.c $(pkg-config --cflags epx) "$lib/libepx.a" -pthread -lm -o static
./static

mkdir cmake && cd cmake
cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.25)
project(consumer C)
find_package(epx 0.1 REQUIRED)
foreach(kind epx epx_static)
  add_executable(with_${kind} ../two_threads.c)
  target_link_libraries(with_${kind} PRIVATE epx::${kind} Threads::Threads)
endforeach()
END
cmake -S . -B out -DCMAKE_PREFIX_PATH="$tmp/moved" >log 2>&1 || { cat log; exit 1; }
cmake --build out >log 2>&1 || { cat log; exit 1; }
out/with_epx
out/with_epx_static
