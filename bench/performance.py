"""Write docs/performance.md from bench/results/*/*.jsonl. Standard library only.

    python3 bench/performance.py > docs/performance.md

Peers' figures are those measured on the same kind of machine (2x H200, one run each) before this project began; they are
constants here because the peers need torch and are not run by our benches.
"""
import collections
import json
import lzma
import os

import performance_cpu
import performance_llama
import performance_serving

HERE = os.path.dirname(os.path.abspath(__file__))
# (H, T): microseconds of the fastest of pplx-kernels 12cecfd, DeepEP 567632d (low latency) and NCCL 2.28.3 all-gather + reduce-scatter
PEERS = {
    (2048, 1): (21.0, "NCCL"), (2048, 8): (22.8, "DeepEP"), (2048, 32): (23.1, "DeepEP"), (2048, 128): (34.3, "NCCL"),
    (2048, 256): (43.8, "NCCL"), (2048, 512): (61.0, "NCCL"), (7168, 1): (26.1, "NCCL"), (7168, 8): (27.0, "NCCL"),
    (7168, 32): (32.7, "NCCL"), (7168, 128): (60.6, "NCCL"), (7168, 256): (75.0, "NCCL"), (7168, 512): (108.1, "NCCL"),
}
HEAD = """# Performance

Written by `bench/performance.py` from `bench/results/`; do not edit.

## Exchange on two H200s of one host

dispatch + combine, microseconds, lower is better: fp8 dispatch with the cast fused, bf16 prereduced combine, top-8, W = 2, real NVLink. One process,
a stream a GPU, CUDA graph of 20 calls with 20 different routings, largest of the two GPUs, median of 9 replays after 2; median (lowest-highest) of three
runs. Every variant's answers are compared bit for bit with a sequential oracle before the timing. *rows*: expert outputs lie expert-major
and combine sums them (what the peers do); *fused*: one weighted row per (token, rank) is given, rows stay in place. Two launches each.
The best of the block counts and of packets or bulk is shown; all variants are in the JSON. Floor: two exchanges of 3.9 us and the link's bytes at
370 GB/s.
"""


def main():
    path = os.path.join(HERE, "results", "h200-x2", "exchange.jsonl.xz")
    rows = [json.loads(line) for line in lzma.open(path, "rt")]
    p50 = collections.defaultdict(list)
    for d in rows:
        p50[d["H"], d["T"], d["case"], d["blocks"], d["packet_tokens"]].append(d["us_p50"])
    print(HEAD)
    print(f"Commit {rows[0]['commit']}, driver {rows[0]['driver']}, {rows[0]['date']}.")
    print()
    print("| H, E | tokens a rank | rows | blocks, mode | fused | best peer | peer / rows | floor |")
    print("|---|---|---|---|---|---|---|---|")
    for (h, t), (peer, name) in PEERS.items():
        cells = []
        for case in ("rows", "fused"):
            found = [(sorted(v), k) for k, v in p50.items() if k[:3] == (h, t, case)]
            v, key = min(found, key=lambda f: f[0][len(f[0]) // 2])
            cells.append((v, key))
        v, key = cells[0]
        mid = v[len(v) // 2]
        text = [f"{c[0][len(c[0]) // 2]:.1f} ({c[0][0]:.1f}-{c[0][-1]:.1f})" for c in cells]
        floor = next(d["floor_us"] for d in rows if (d["H"], d["T"]) == (h, t))
        mode = "packets" if key[4] else "bulk"
        print(f"| {h}, {256 if h == 7168 else 128} | {t} | {text[0]} | {key[3]}, {mode} | {text[1]} | {peer} {name} | {peer / mid:.2f} | {floor:.1f} |")
    print()
    performance_cpu.print_cpu()
    print("\n".join(performance_serving.section()))
    print()
    print("\n".join(performance_llama.section()))


main()
