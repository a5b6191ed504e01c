#!/bin/sh
# llama.cpp's server and epx on the same bf16 weights and threads, one after the other, driven by `epx bench serve` over /v1/completions.
# Usage: compare.sh LLAMA_SERVER CHECKPOINT_DIR FILE.gguf OUT.jsonl [SEED]   from the root of the repository. EPX: build/epx; THREADS: 2;
# RUN: what to start servers with, such as "chrt -f 50" on a machine with other work.
# make_checkpoint.py and to_gguf.py write the model. llama.cpp: the sdist llama-cpp-python 0.3.16 of PyPI, built with
#   cmake -B b -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF vendor/llama.cpp
set -eu
[ $# -ge 4 ] || { sed -n 2,7p "$0"; exit 2; }
llama=$1 model=$2 gguf=$3 out=$4 seed=${5:-1}
epx=${EPX:-build/epx} threads=${THREADS:-2} run=${RUN:-}

# drive SERVER: case, requests, prompt tokens, new tokens, at a time
drive() {
    while read -r name n in_len out_len at_once; do
        "$epx" bench serve --backend vllm --port $port --model x --tokenizer "$model" --dataset-name random-ids --num-prompts "$n" \
            --random-input-len "$in_len" --random-output-len "$out_len" --random-range-ratio 1 --max-concurrency "$at_once" --seed "$seed" \
            --warmup-requests 1 --disable-tqdm --tag "$1-$name" --output-file "$out" >/dev/null
    done <<-CASES
	prefill 3 512 1 1
	one 2 16 64 1
	four 4 16 64 4
	sixteen 16 16 64 16
	eight 16 128 64 8
	CASES
}

# measure SERVER PORT COMMAND...: start, wait until it answers, drive, stop. A port each: the first may stay taken for a while.
measure() {
    name=$1 port=$2 tries=0
    shift 2
    # shellcheck disable=SC2086
    $run "$@" >"$out.$name.log" 2>&1 &
    pid=$!
    until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
        tries=$((tries + 1))
        [ $tries -lt 240 ] && kill -0 $pid || { echo "$name did not start: $out.$name.log"; exit 1; }
        sleep 0.5
    done
    drive "$name"
    kill $pid
    wait $pid || true
}

measure llama 31800 "$llama" -m "$gguf" -t "$threads" -tb "$threads" -np 16 -c 16384 --port 31800
measure epx 31801 "$epx" serve --model-path "$model" --threads "$threads" --port 31801 --disable-radix-cache --served-model-name x --log-level error
