"""The part of docs/performance.md about llama.cpp, from bench/results/xeon-2cpu/llama.jsonl.xz. Standard library only; see performance.py."""
import collections
import json
import lzma
import os

HERE = os.path.dirname(os.path.abspath(__file__))
HEAD = """## Against llama.cpp on two processor cores

llama-server (llama-cpp-python 0.3.16, built for this machine) and `epx serve` with one rank, both with 2 threads, on the same bf16 weights, one after the other;
driven by `epx bench serve` over `/v1/completions` with random prompts, no prefix cache: `bench/peers/llama_cpp/compare.sh`. Tokens a second: of the prompt
for the first line, new ones for the others; median (lowest-highest) of the runs. Both servers had real-time priority, since other work ran on the machine.
"""
MODELS = {"big": "12 layers, hidden 1024, 32 experts top-8 (978 M weights)", "tiny": "tinymoe-math (11 M weights)"}
CASES = {
    "prefill": "prompts of 512, one at a time",
    "one": "64 new tokens, one at a time",
    "four": "64 new tokens, 4 at a time",
    "sixteen": "64 new tokens, 16 at a time",
    "eight": "prompts of 128, 64 new tokens, 8 at a time",
}


def middle(values):
    return sorted(values)[len(values) // 2]


def cell(values):
    return f"{middle(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def section():
    with lzma.open(os.path.join(HERE, "results", "xeon-2cpu", "llama.jsonl.xz"), "rt", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    speed = collections.defaultdict(list)
    for d in rows:
        speed[d["model"], d["case"], d["server"]].append(d["prompt_tok_s"] if d["case"] == "prefill" else d["output_tok_s"])
    yield HEAD
    yield f"Commit {rows[0]['commit']}, {rows[0]['date']}."
    yield ""
    yield "| model | requests | llama.cpp | epx | epx / llama.cpp |"
    yield "|---|---|---|---|---|"
    for model, title in MODELS.items():
        for case, text in CASES.items():
            llama, ours = speed[model, case, "llama"], speed[model, case, "epx"]
            yield f"| {title} | {text} | {cell(llama)} | {cell(ours)} | {middle(ours) / middle(llama):.2f} |"
    yield ""
    yield "Not supported: int8 and 4-bit weights, which llama.cpp has; NEON; placement on NUMA nodes."
