#!/usr/bin/env python3
"""`epx plan` against measurements: its bytes with the library's counters in `epx bench a2a`, its memory with the plan's, its
expected times with those of bench/results/h200-x2.

Usage: plan_test.py EPX_PROGRAM RESULTS.  The routing of the bench is random: bytes of the busiest rank may exceed the mean by 6 %.
"""
import json
import lzma
import subprocess
import sys
import tempfile

EPX = sys.argv[1]


def lines(*args):
    with tempfile.NamedTemporaryFile() as f:
        subprocess.run([EPX, *args, "--json", f.name], check=True, stdout=subprocess.DEVNULL, timeout=50)
        return [json.loads(line) for line in open(f.name)]


def expected_ranks(e, k, w):
    """Mean number of other ranks by summing over ranks: a second way to the same number."""
    reached = 0.0
    for r in range(w):
        own = e // w + (1 if r < e % w else 0)
        miss = 1.0
        for i in range(k):
            miss *= max(0, e - own - i) / (e - i)
        reached += (1 - miss) * (w - 1) / w
    return reached


n_bad = n = 0
for w, (e, k, h), tokens in ((2, (16, 4, 256), "64"), (3, (17, 5, 136), "3,48"), (4, (64, 8, 128), "33")):
    measured = lines("bench", "a2a", "--peers", "none", "--ranks", str(w), "--shapes", f"{e}x{k}x{h}", "--tokens", tokens, "--backends",
                     "onesided", "--combines", "exact,prereduced", "--dtypes", "bf16,fp8", "--inputs", "private", "--blocks", "1",
                     "--block-ms", "1")
    for m in (m for m in measured if m["kind"] == "epx"):
        p, = lines("plan", "--hidden", str(h), "--experts", str(e), "--top-k", str(k), "--ranks", str(w), "--tokens", str(m["T"]),
                   "--dtype", m["dispatch_dtype"], "--combine", m["combine_mode"])
        want = p["dispatch_bytes"] + p["combine_bytes"]
        slack = 0.06 if m["T"] > 8 else 0.25
        ok = m["checked"] and abs(m["wire_bytes"] / want - 1) < slack and m["buffer_bytes"] == p["buffer_bytes"]
        ok = ok and abs(p["ranks_reached"] - expected_ranks(e, k, w)) < 1e-6
        n, n_bad = n + 1, n_bad + (not ok)
        print("ok" if ok else "FAILED", f"W {w} T {m['T']} {m['name']}: bytes {m['wire_bytes']} planned {want:.0f},",
              f"memory {m['buffer_bytes']} planned {p['buffer_bytes']}")
# The figures of the design for DeepSeek-V3: 0.997, 2.71, 4.63 other ranks, and at most 32 MB for T = 128 on 8 ranks.
v3 = lines("plan", "--hidden", "7168", "--experts", "256", "--top-k", "8", "--ranks", "2,4,8,4096", "--tokens", "128")
for p, want in zip(v3, (0.997, 2.71, 4.63)):
    n, n_bad = n + 1, n_bad + (abs(p["ranks_reached"] - want) > 0.006)
if v3[2]["buffer_bytes"] is None or v3[2]["buffer_bytes"] > 32e6:
    n_bad += 1
    print("FAILED: buffers of DeepSeek-V3's shape, 128 tokens, 8 ranks:", v3[2]["buffer_bytes"])
# Times on the one link that this project has measured: the best variant of each size, fp8 out, one bf16 sum a rank back.
best = {}
for m in map(json.loads, lzma.open(sys.argv[2], "rt")):
    if m["case"] == "fused" and m["dispatch_dtype"] == "fp8_e4m3" and m["combine_mode"] == "partial" and m["checked"]:
        key = (m["E"], m["K"], m["H"], m["T"], m["W"])
        best[key] = min(m["us_p50"], best.get(key, m["us_p50"]))
for (e, k, h, t, w), us in sorted(best.items()):
    p, = lines("plan", "--hidden", str(h), "--experts", str(e), "--top-k", str(k), "--ranks", str(w), "--tokens", str(t))
    ratio = us / p["expected_us"]
    ok = 0.65 < ratio < 1.35 and us > p["floor_us"]
    n, n_bad = n + 1, n_bad + (not ok)
    print("ok" if ok else "FAILED", f"E {e} H {h} T {t}: measured {us:.1f} us, expected {p['expected_us']:.1f}, ratio {ratio:.2f}")
n_bad += len(best) < 6
print(f"{n - n_bad} of {n} right; V3, T 128, 8 ranks: {v3[2]['buffer_bytes']} bytes")
sys.exit(n_bad != 0)
