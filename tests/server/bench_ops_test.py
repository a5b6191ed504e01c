"""`epx bench ops`: every case is there, its operations and bytes are those of the formulas, mistakes are named. No speed is checked."""

import json
import subprocess
import sys

EPX = sys.argv[1]
SHAPE = dict(hidden=64, ffn=32, experts=8, top_k=2, heads=4, kv_heads=2, head_dim=16, context=40)


def run(*args):
    return subprocess.run([EPX, "bench", "ops", *args], capture_output=True, text=True, timeout=60)


def shape_flags():
    return [word for name, value in SHAPE.items() for word in ("--" + name.replace("_", "-"), str(value))]


def check_lines():
    out = run("--rows", "1,7", "--dtypes", "bf16,fp8,f32", "--threads", "2", "--ms", "2", "--footprint-mib", "1", "--json", "-",
              *shape_flags())
    assert out.returncode == 0, out.stderr
    rows = [json.loads(line) for line in out.stdout.splitlines()]
    # two products and the experts of each type; attention's two cases where weights are not fp8
    assert len(rows) == 2 * (3 * 3 + 2 * 2), len(rows)
    width = {"bf16": 2, "f32": 4, "fp8": 1}
    s = SHAPE
    for r in rows:
        m = r["rows"]
        assert r["us_p50"] > 0 and r["us_p99"] >= r["us_p50"] and r["roof_us"] > 0 and r["samples"] >= 5, r
        if r["op"] == "linear, qkv":
            n = (s["heads"] + 2 * s["kv_heads"]) * s["head_dim"]
            want = 2 * m * n * s["hidden"], n * s["hidden"] * width[r["dtype"]]
        elif r["op"] == "linear, o":
            want = 2 * m * s["hidden"] * s["heads"] * s["head_dim"], s["hidden"] * s["heads"] * s["head_dim"] * width[r["dtype"]]
        elif r["op"] == "experts":
            one = 3 * s["hidden"] * s["ffn"]
            hit = r["bytes"] / one / width[r["dtype"]]
            assert hit == int(hit) and s["top_k"] <= hit <= min(s["experts"], m * s["top_k"]), r
            want = 2 * one * m * s["top_k"], r["bytes"]
        else:
            decode = r["op"] == "attention, decode"
            positions = m * s["context"] if decode else sum(s["context"] - i for i in range(m))
            kv = (m if decode else 1) * s["context"] * s["kv_heads"] * s["head_dim"] * 2 * 4
            want = 4 * positions * s["heads"] * s["head_dim"], kv
        assert (r["flops"], r["bytes"]) == want, (r, want)


def check_refusals():
    for args, words in ((["--rows", "0"], "--rows 0: legal: up to 16 integers from 1 to 4096"),
                        (["--dtypes", "int8"], "--dtypes int8: legal: up to three of bf16, f32, fp8"),
                        (["--heads", "6", "--kv-heads", "4"], "--kv-heads 4: legal: a divisor of --heads 6"),
                        (["--top-k", "9", "--experts", "8"], "--top-k 9: legal: 1 to --experts 8"),
                        (["--head-dim", "7"], "--head-dim 7: legal: even numbers")):
        out = run(*args)
        assert out.returncode == 2 and words in out.stderr, (args, out.stderr)
    out = run("--isa", "mmx")
    assert out.returncode == 1 and "mmx" in out.stderr and "scalar" in out.stderr, out.stderr


check_lines()
check_refusals()
