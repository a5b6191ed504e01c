"""The serving part of docs/performance.md, from bench/results/xeon-2cpu/serving.jsonl. Standard library only; see performance.py."""
import collections
import json
import os

HERE = os.path.dirname(os.path.abspath(__file__))
HEAD = """## Serving on two processor cores

Two virtual cores of an Intel Xeon (AVX-512, bf16), the bundled model tinymoe-math, ranks as processes, exact combine. `bench_serving` (bench/engine):
layouts take turns on the same requests, new ones in every round, greedy; the texts of all layouts must be equal or nothing is reported. The ratio
is that of a round's times: median of 12 rounds (8 for the prefix cache), lowest and highest quartile over the runs. Other work ran on the
machine below real-time priority, so the ratios spread more than those of a quiet one.
"""
WORKLOADS = {
    "prefill": "16 prompts of 240 tokens, 1 new token",
    "decode": "32 prompts of 16 tokens, 48 new tokens",
    "shared": "32 prompts of 512 tokens, the first 480 in common, 16 new tokens",
}


def spread(values, digits):
    values = sorted(values)
    return f"{values[len(values) // 2]:.{digits}f} ({values[0]:.{digits}f}-{values[-1]:.{digits}f})"


def layouts(rows):
    groups = collections.defaultdict(list)
    for d in rows:
        groups[d["workload"], d["layout"], d["against"]].append(d)
    yield "| requests | layout | tokens/s (prompt and new) | ratio to | ratio of each run | quartiles |"
    yield "|---|---|---|---|---|---|"
    for (workload, layout, against), runs in groups.items():
        rate = spread([d["tokens_per_s"] for d in runs], 0)
        if layout == against:
            yield f"| {WORKLOADS[workload]} | {layout} | {rate} | | | |"
            continue
        ratios = ", ".join(f"{d['ratio_p50']:.2f}" for d in runs)
        low, high = min(d["ratio_p25"] for d in runs), max(d["ratio_p75"] for d in runs)
        yield f"| {WORKLOADS[workload]} | {layout} | {rate} | {against} | {ratios} | {low:.2f}-{high:.2f} |"


def section():
    """The whole section as lines."""
    path = os.path.join(HERE, "results", "xeon-2cpu", "serving.jsonl")
    with open(path) as f:
        rows = [json.loads(line) for line in f]
    serving = [d for d in rows if d["bench"] == "serving"]
    sched = [d for d in rows if d["bench"] == "scheduler"]
    yield HEAD
    yield f"Commit {serving[-1]['commit']}, {serving[-1]['date']}."
    yield ""
    yield from layouts(serving)
    yield ""
    yield (f"Scheduler alone (`bench_sched`, simulated clock, {sched[0]['running']} running requests, {sched[0]['ends_per_step']:.0f} ends and "
           f"{sched[0]['prompt_tokens_per_step']:.0f} prompt tokens a step, prefix cache, {sched[0]['steps']} steps): processor time of a step, "
           "each run: "
           + "; ".join(f"median {d['us_p50']:.0f} us, p99 {d['us_p99']:.0f}, most {d['us_max']:.0f}" for d in sched) + ".")
    yield ""
    yield ("\"In halves\" is `--enable-two-batch-overlap`. It hides waiting for the other rank and costs smaller products and a second reading of each "
           "weight.")
