"""Ranks of a test: threads of this process, or processes of the calling script; and the oracle, in numpy and float64."""
import os
import socket
import subprocess
import sys
import threading
import time
import traceback

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "python"))

SEED = int(os.environ.get("EPX_TEST_SEED", "1"))


def run_cases(cases):
    """Run functions, print one line each; exit 1 if one failed."""
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")]
    bad, n = [], 0
    print(f"seed {SEED}", flush=True)
    for case in cases:
        if wanted and case.__name__ not in wanted:
            continue
        start, n = time.monotonic(), n + 1
        try:
            case()
            print(f"ok {case.__name__} ({time.monotonic() - start:.2f} s)", flush=True)
        except Exception:
            bad.append(case.__name__)
            traceback.print_exc()
            print(f"FAILED {case.__name__}", flush=True)
    print(f"{n - len(bad)} passed, {len(bad)} failed")
    sys.exit(1 if bad else 0)


def threads(n_ranks, body):
    """body(world, rank) on n_ranks threads; the first exception is raised here."""
    import epx
    worlds = epx.World.local(n_ranks)
    errors = []

    def one(rank):
        try:
            body(worlds[rank], rank)
        except BaseException as e:
            errors.append((rank, e))

    started = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(n_ranks)]
    for t in started:
        t.start()
    for t in started:
        t.join(40)
    if errors:
        raise AssertionError(f"rank {errors[0][0]} failed") from errors[0][1]
    assert not any(t.is_alive() for t in started), "a rank hangs"
    for w in worlds:
        w.close()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def processes(script, name, n_ranks, codes=None, limit_s=50, env=None):
    """`script --rank NAME RANK N_RANKS` for each rank, with EPX_INIT_ADDR and EPX_JOIN_TOKEN; exit codes must be `codes` (default: 0)."""
    env = dict(os.environ, EPX_INIT_ADDR=f"127.0.0.1:{free_port()}", EPX_JOIN_TOKEN="of a test", **(env or {}))
    started = [subprocess.Popen([sys.executable, script, "--rank", name, str(r), str(n_ranks)], env=env, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True) for r in range(n_ranks)]
    outputs, deadline = [], time.monotonic() + limit_s
    for p in started:
        try:
            outputs.append(p.communicate(timeout=max(deadline - time.monotonic(), 1))[0])
        except subprocess.TimeoutExpired:
            p.kill()
            outputs.append(p.communicate()[0] + "\n(killed: it did not end)")
    got = [p.returncode for p in started]
    text = "\n".join(f"--- rank {r}, code {c}\n{o}" for r, (c, o) in enumerate(zip(got, outputs)))
    assert got == (codes or [0] * n_ranks), text
    return outputs


def as_rank(bodies):
    """When this process was started by processes(): run the body and exit."""
    if len(sys.argv) > 4 and sys.argv[1] == "--rank":
        name, rank, n = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        {b.__name__: b for b in bodies}[name](rank, n)
        sys.stdout.flush()
        sys.exit(0)


def refused(kind, *parts):
    """A with block that must raise `kind` with all of `parts` in the message."""
    return _Refused(kind, parts)


class _Refused:
    def __init__(self, kind, parts):
        self.kind, self.parts = kind, parts

    def __enter__(self):
        return self

    def __exit__(self, kind, e, _trace):
        assert e is not None, f"nothing was raised, wanted {self.kind.__name__}"
        if not isinstance(e, self.kind):
            return False
        missing = [p for p in self.parts if p not in str(e)]
        assert not missing, f"{missing} is not in: {e}"
        return True


# ---- data: small multiples of a power of two, so that sums in any order and precision are exact ----


def bf16(a):
    """float array -> bits of bf16 (round to nearest, ties to even)."""
    u = np.ascontiguousarray(a, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def widen(a):
    """An array of any of the tests' dtypes as float64; uint16 is bf16."""
    if a.dtype == np.uint16:
        return (a.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return a.astype(np.float64)


def narrow(a, like):
    return bf16(a) if like == np.uint16 else np.asarray(a, np.float64).astype(like)


def owners(n_experts, n_ranks):
    """Expert -> rank, even split: the first ranks have one more."""
    q, r = divmod(n_experts, n_ranks)
    return np.repeat(np.arange(n_ranks), [q + (i < r) for i in range(n_ranks)])


class Batch:
    """Tokens of one source. Values and weights are multiples of 1/4 and 1/8, so that f32 sums are exact; small: of 1/2 and few, so that
    partial sums are exact in bf16, too. fp8: any codes, or small ones."""

    def __init__(self, seed, n, hidden, top_k, n_experts, dtype, drop=True, small=False):
        g = np.random.default_rng(seed)
        self.n = n
        if dtype == np.uint8:
            self.x, self.scale = g.integers(0, 3 if small else 120, (n, hidden)).astype(np.uint8), g.integers(1, 9, (n, -(-hidden // 128))).astype(np.float32)
        else:
            self.x, self.scale = narrow(g.integers(-2, 3, (n, hidden)) if small else g.integers(-16, 17, (n, hidden)) / 4, dtype), None
        self.ids = np.stack([g.permutation(n_experts)[:top_k] for _ in range(n)]).astype(np.int32) if n else np.zeros((0, top_k), np.int32)
        if drop and n:
            self.ids[g.random((n, top_k)) < 0.2] = -1
        self.weights = (g.integers(0, 3, (n, top_k)) / 2 if small else g.integers(0, 9, (n, top_k)) / 8).astype(np.float32)


def expert_rows(batches, expert):
    """(source, token) of an expert's rows, in the library's order."""
    return [(s, t) for s, b in enumerate(batches) for t in range(b.n) if expert in b.ids[t]]


def answer_of(expert, value):
    """What expert `expert` makes of a row: exact in 16 bits."""
    return value * (expert % 3 + 1)


def combined(batch, value_of_row, weights=None):
    """Weighted sums of a batch's tokens: value_of_row(t, expert) -> [H]."""
    w = batch.weights if weights is None else weights
    out = np.zeros((batch.n, batch.x.shape[1]))
    for t in range(batch.n):
        for k, e in enumerate(batch.ids[t]):
            if e >= 0:
                out[t] += float(w[t, k]) * value_of_row(t, e)
    return out
