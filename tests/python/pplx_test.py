#!/usr/bin/env python3
"""The module pplx_kernels with numpy on CPUs: pplx_test.py [CASE...], with EPX_LIBRARY set; exit 77 without numpy.

SGLang's sequence of calls against an oracle in numpy, ranks as processes; the calls around NVSHMEM; refusals; a killed peer.
"""
import os
import signal
import sys
import tempfile
import time

try:
    import numpy as np
except ImportError:
    print("skip: numpy is not installed (Debian: python3-numpy)")
    sys.exit(77)
from ranks import SEED, Batch, answer_of, as_rank, combined, expert_rows, narrow, owners, processes, refused, run_cases, widen

import epx
import pplx_kernels as pplx

NOT_SENT = 0xFFFFFFFF


def by_address(rank, n):
    """The launcher's spelling, with EPX_INIT_ADDR for torch.distributed."""
    pplx.nvshmem_init(global_rank=rank, local_rank=rank, world_size=n, device="cpu")


def value(batch, t):
    """What row t stands for, scales applied."""
    row = widen(batch.x[t])
    return row if batch.scale is None else row * np.repeat(batch.scale[t].astype(np.float64), 128)[:row.size]


class Case:
    """One AllToAll and what its ranks give: SGLang's shapes, small."""

    def __init__(self, rank, n, dp, x, y, out, hidden=128, n_experts=8, top_k=3, cap=6, **more):
        self.rank, self.n, self.dp, self.hidden, self.n_experts, self.top_k, self.cap = rank, n, dp, hidden, n_experts, top_k, cap
        self.x, self.y, self.out = x, y, out
        self.mine = np.flatnonzero(owners(n_experts, n) == rank)
        itemsize = np.dtype(x).itemsize
        self.scales = -(-hidden // 128) if itemsize == 1 else 0
        self.ata = pplx.AllToAll.intranode(max_num_tokens=cap, num_experts=n_experts, experts_per_token=top_k, rank=rank, world_size=n,
                                           dp_size=dp, hidden_dim=hidden, hidden_dim_bytes=hidden * itemsize,
                                           hidden_dim_scale_bytes=4 * self.scales, group_name="pplx_ep", **more)

    def batches(self, step):
        """One for each DP group; sizes differ, some are 0."""
        g = np.random.default_rng(SEED + step)
        sizes = g.integers(0, self.cap + 1, self.n // self.dp)
        sizes[step % len(sizes)] = (0, self.cap)[step // 2 % 2]
        return [Batch(SEED * 77 + step * 10 + i, int(t), self.hidden, self.top_k, self.n_experts, self.x, small=self.x == np.uint8)
                for i, t in enumerate(sizes)]

    def step(self, step, halves=False, padded=False):
        """Zero-filled outputs of the full capacity, uint32 indices, bound_m, as SGLang does; then the oracle. padded: rows past
        bound_m that must not be looked at."""
        batches = self.batches(step)
        own = batches[self.rank // self.dp]
        rows_cap, el = self.cap * self.n // self.dp, len(self.mine)
        counts = np.zeros(el, np.int32)
        rows = np.zeros((el, rows_cap, self.hidden), self.x)
        scales = np.zeros((el, rows_cap, self.scales), np.float32) if self.scales else None
        pad = self.cap - own.n if padded else 0
        x = np.concatenate([own.x, np.full((pad, self.hidden), 99, self.x)])
        x_scale = np.concatenate([own.scale, np.full((pad, self.scales), np.nan, np.float32)]) if self.scales else None
        ids = np.concatenate([own.ids, np.full((pad, self.top_k), 7777, np.int32)]).view(np.uint32)
        weights = np.concatenate([own.weights, np.full((pad, self.top_k), np.nan, np.float32)])
        bound = np.array([own.n], np.uint32) if padded or step % 2 else None
        both = [(True, False), (False, True)] if halves else [(True, True)]
        for send, recv in both:
            self.ata.dispatch(counts, rows, scales, x, x_scale, ids, bound, do_send=send, do_recv=recv)
        y = np.full(rows.shape, 55, self.y)
        for e, expert in enumerate(self.mine):
            want = expert_rows(batches, expert)
            assert counts[e] == len(want), (step, expert, counts[e], len(want))
            for i, (src, t) in enumerate(want):
                assert np.array_equal(rows[e, i], batches[src].x[t]), (step, expert, i)
                assert scales is None or np.array_equal(scales[e, i], batches[src].scale[t]), (step, expert, i)
                y[e, i] = narrow(answer_of(expert, value(batches[src], t)), self.y)
            assert not rows[e, len(want):].any() and (scales is None or not scales[e, len(want):].any()), "a row past the count was written"
        out = np.zeros((self.cap, self.hidden), self.out)
        for send, recv in both:
            self.ata.combine(out, ids, weights, y, bound, do_send=send, do_recv=recv)
        want = combined(own, lambda t, e: answer_of(e, value(own, t)))
        assert np.array_equal(out[:own.n], narrow(want, self.out)), (step, out[:own.n], want)
        assert not out[own.n:].any(), "a row past the tokens was written"

    def run(self, steps=6):
        for i in range(steps):
            self.step(i, halves=i % 3 == 2, padded=i % 2 == 0)
        self.ata.poll()
        self.ata.destroy()


BF16, F16, F32, FP8 = np.uint16, np.float16, np.float32, np.uint8


def rank_sequence(rank, n):
    by_address(rank, n)
    for dp in [d for d in (1, 2) if n % d == 0]:
        Case(rank, n, dp, BF16, BF16, BF16).run()
        Case(rank, n, dp, F16, F16, F16, n_experts=7).run()  # another dtype than the default: a new plan at the first combine
        Case(rank, n, dp, FP8, BF16, BF16, hidden=320).run()
        Case(rank, n, dp, FP8, F32, F16, hidden=256, out_dtype=F16, expert_dtype=F32).run()
        Case(rank, n, dp, BF16, F32, F16).run()
        Case(rank, n, dp, F32, F32, F16).run()
    pplx.nvshmem_finalize()


def the_sequence_of_sglang():
    processes(__file__, "rank_sequence", 4)


def one_rank_and_odd_numbers():
    processes(__file__, "rank_sequence", 1)
    processes(__file__, "rank_sequence", 3)


def rank_strided(rank, n):
    """Scales with strides and fewer columns than the bytes say, weights with a row stride."""
    by_address(rank, n)
    c = Case(rank, n, 1, FP8, BF16, BF16, hidden=256)
    c.ata.destroy()
    ata = pplx.AllToAll.intranode(max_num_tokens=2, num_experts=2, experts_per_token=1, rank=rank, world_size=n, dp_size=1, hidden_dim=256,
                                  hidden_dim_bytes=256, hidden_dim_scale_bytes=16, device="cpu")  # 2 scales, rounded up to 16 bytes
    x, scale = np.full((2, 256), 1 + rank, np.uint8), np.asfortranarray(np.arange(4, dtype=np.float32).reshape(2, 2) + 10 * rank)
    ids, weights = np.array([[0], [1]], np.uint32), np.ones((2, 4), np.float32)[:, :1]
    weights[:] = [[1], [2]]
    counts, rows = np.zeros(1, np.int32), np.zeros((1, 2 * n, 256), np.uint8)
    out_scale = np.full((1, 2, 2 * n), 5, np.float32).transpose(0, 2, 1)  # column-major
    ata.dispatch(counts, rows, out_scale, x, scale, ids, None)
    assert counts[0] == n and out_scale[0, :n].tolist() == [[2 * rank + 10 * s, 2 * rank + 1 + 10 * s] for s in range(n)], out_scale
    assert (out_scale[0, n:] == 5).all(), "scales past the count were written"
    out = np.zeros((2, 256), F32)
    ata.combine(out, ids, weights, np.full((1, 2 * n, 256), 3, F32), None)
    assert out[:, 0].tolist() == [3, 6], out[:, 0]
    ata.destroy()
    pplx.nvshmem_finalize()


def strides_are_honoured():
    processes(__file__, "rank_strided", 2)


def rank_by_id(rank, n):
    """The spelling with a unique id; all-to-all and barriers; two AllToAll at once, made and destroyed again and again."""
    path = os.environ["UID_FILE"]
    uid = pplx.nvshmem_get_unique_id() if rank == 0 else pplx.nvshmem_alloc_empty_unique_id()
    assert uid.shape == (128,) and uid.dtype == np.uint8
    if rank == 0:
        uid.tofile(path + ".new")
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    uid[:] = np.fromfile(path, np.uint8)
    pplx.nvshmem_init(uid, rank, n)
    pplx.nvshmem_init(uid, rank, n)  # once more: nothing
    with refused(epx.StateError, "called before", "nvshmem_finalize"):
        pplx.nvshmem_init(uid, 0, 1 + n)
    assert (pplx.nvshmem_my_pe(), pplx.nvshmem_n_pes()) == (rank, n) and os.environ.get("EPX_JOIN_TOKEN") == "of a test"
    for shape, dtype in (((n, 5), np.uint8), ((n, 3, 7), np.float32), ((n, 40), np.float16)):
        source, dest = pplx.nvshmem_malloc(shape, dtype), pplx.nvshmem_malloc(shape, dtype)
        for turn in range(3):
            source[:] = np.arange(source.size).reshape(shape) % 50 + 60 * rank + turn
            pplx.nvshmem_alltoall(dest, source)
            pplx.nvshmem_barrier_all()
            for src in range(n):
                want = (np.arange(source.size).reshape(shape) % 50 + 60 * src + turn).astype(dtype)[rank]
                assert np.array_equal(dest[src], want), (turn, src, dest[src], want)
    pplx.nvshmem_barrier_all_on_current_stream()
    for _ in range(3):
        first, second = Case(rank, n, 1, BF16, BF16, BF16), Case(rank, n, 1, F16, F16, F16, hidden=16, cap=3)
        first.step(1), second.step(1), first.step(2), second.step(2)
        first.ata.destroy(), first.ata.destroy()
        second.step(3), second.ata.destroy()
        with refused(epx.StateError, "destroyed"):
            second.step(4)
    pplx.nvshmem_finalize()
    pplx.nvshmem_finalize()
    with refused(epx.StateError, "nvshmem_my_pe() before nvshmem_init()"):
        pplx.nvshmem_my_pe()


def unique_ids_and_alltoall():
    with tempfile.TemporaryDirectory() as folder:
        env = {"UID_FILE": os.path.join(folder, "uid")}
        processes(__file__, "rank_by_id", 3, env=env)


def rank_internode(rank, n):
    """Ranks that act as if they were on two hosts; without UCX the error says so."""
    if not any(c.name == "ucx" and c.available for c in epx.components()):
        with refused(epx.UnsupportedError, "ucx"):
            by_address(rank, n)
        return
    by_address(rank, n)
    ata = pplx.AllToAll.internode(2, 2, 1, rank, n, 1, 16, 32, 0)
    x, ids, weights = np.full((2, 16), rank + 1, F16), np.array([[0], [1]], np.uint32), np.ones((2, 1), F32)
    counts, rows, out = np.zeros(1, np.int32), np.zeros((1, 4, 16), F16), np.zeros((2, 16), F16)
    ata.dispatch(counts, rows, None, x, None, ids, None)
    assert rows[0, :2, 0].tolist() == [1, 2] and ata.plan.info.transport == "ucx"
    ata.combine(out, ids, weights, rows, None)
    assert np.array_equal(out, x)
    ata.destroy()
    pplx.nvshmem_finalize()


def between_hosts():
    processes(__file__, "rank_internode", 2, env={"EPX_EMULATED_HOSTS": "2"})


def refusals():
    good = dict(max_num_tokens=4, num_experts=4, experts_per_token=2, rank=0, world_size=1, dp_size=1, hidden_dim=128, hidden_dim_bytes=256,
                hidden_dim_scale_bytes=0)
    for bad, *parts in [({"hidden_dim_bytes": 384}, "hidden_dim_bytes is 384", "1, 2 or 4"), ({"dp_size": 2}, "dp_size is 2", "divisor"),
                        ({"rank": 1}, "rank is 1", "0 to world_size - 1"), ({"num_experts": 0}, "num_experts is 0", "1 or more"),
                        ({"experts_per_token": 65}, "top_k is 65"), ({"hidden_dim_scale_bytes": 16}, "hidden_dim_scale_bytes is 16"),
                        ({"hidden_dim_scale_bytes": 6, "hidden_dim_bytes": 128}, "is 6", "4 bytes for each"),
                        ({"world_size": 2}, "no group of rank 0 of world_size 2", "nvshmem_init() was not called", "Register a group"),
                        ({"expert_dtype": "int8"}, "expert_dtype is int8", "bfloat16"), ({"device": "tpu:0"}, "device is 'tpu:0'", "cuda:N")]:
        with refused(epx.ArgumentError, *parts):
            pplx.AllToAll.intranode(**dict(good, **bad))
    with refused(epx.UnsupportedError, "device is 0"):
        pplx.AllToAll.intranode(**good, device="cuda:0")
    ata = pplx.AllToAll.intranode(**good)
    x, ids, weights = np.ones((3, 128), F16), np.zeros((3, 2), np.uint32), np.ones((3, 2), F32)
    counts, rows = np.zeros(4, np.int32), np.zeros((4, 4, 128), F16)
    args = dict(out_expert_num_tokens=counts, out_expert_x=rows, out_expert_x_scale=None, dp_x=x, dp_x_scale=None, indices=ids, bound_m=None)
    for kind, bad, *parts in [
        (epx.CapacityError, {"dp_x": np.ones((5, 128), F16), "indices": np.zeros((5, 2), np.uint32)}, "5 rows", "max_num_tokens = 4"),
        (epx.ArgumentError, {"dp_x": x.astype(F32)}, "dp_x has dtype float32", "2 bytes"), (epx.ArgumentError, {"indices": ids.astype(np.int64)}, "indices has dtype int64", "uint32"),
        (epx.ArgumentError, {"indices": ids[:2]}, "indices has shape [2, 2]", "[3, 2]"), (epx.ArgumentError, {"out_expert_x": rows[:, :3]}, "[4, 3, 128]", "[4, 4, 128]"),
        (epx.ArgumentError, {"out_expert_x": rows.view(np.uint16)}, "out_expert_x has dtype uint16", "float16"),
        (epx.ArgumentError, {"out_expert_num_tokens": counts[:3]}, "out_expert_num_tokens", "[3]"), (epx.ArgumentError, {"dp_x_scale": weights}, "dp_x_scale is given", "None"),
        (epx.ArgumentError, {"out_expert_x_scale": weights}, "out_expert_x_scale is given"), (epx.ArgumentError, {"bound_m": np.array([4], np.uint32)}, "bound_m is 4", "3 rows"),
        (epx.ArgumentError, {"indices": ids + np.uint32(4)}, "ids[token 0][k 0] is 4", "0"), (epx.ArgumentError, {"do_send": False, "do_recv": False}, "both False")]:
        with refused(kind, *parts):
            ata.dispatch(**dict(args, **bad))
    ata.dispatch(**args)
    with refused(epx.StateError, "expected: combine_send"):
        ata.dispatch(**args)
    y, out = np.ones((4, 4, 128), F16), np.zeros((4, 128), F16)
    for bad, *parts in [((out, ids[:2], weights, y, None), "indices has 2 rows", "the 3 rows of dispatch"), ((out[:2], ids, weights, y, None), "[2, 128]", "3 or more"),
                        ((out, ids, weights.astype(F16), y, None), "weights has dtype float16"), ((out, ids, weights, y.astype(np.int32), None), "expert_y has dtype int32"),
                        ((out, ids, weights, y[:, :2], None), "[4, 2, 128]"), ((out.astype(F32), ids, weights, y, None), "float32 with 2 bytes")]:
        with refused(epx.ArgumentError, *parts):
            ata.combine(*bad)
    ata.combine(out, ids, weights, y, None)
    assert (out[:3] == 2).all() and not out[3].any()
    ata.destroy()
    fixed = pplx.AllToAll.intranode(**good, out_dtype=np.float16)
    fixed.dispatch(**args)
    with refused(epx.ArgumentError, "expert_y is float32", "made for expert_dtype float16"):
        fixed.combine(out, ids, weights, y.astype(F32), None)
    fixed.combine(out, ids, weights, y, None)
    fixed.destroy()
    for call, *parts in [(lambda: pplx.nvshmem_init(np.zeros(128, np.uint8), 0, 1), "uid", "nvshmem_get_unique_id"),
                         (lambda: pplx.nvshmem_init(1, 2), "nvshmem_init()", "uid, rank, world_size"),
                         (lambda: pplx.nvshmem_init(global_rank=0, local_rank=0, world_size=2, device="cpu"), "EPX_INIT_ADDR")]:
        with refused(epx.ArgumentError, *parts):
            call()


def rank_killed(rank, n):
    by_address(rank, n)
    c = Case(rank, n, 1, BF16, BF16, BF16, timeout_s=20)
    c.step(0), c.step(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for i in range(2, 5):
            c.step(i)
        raise AssertionError("the exchange went on without rank 1")
    except epx.PeerError as e:
        assert "rank 1" in str(e) and time.monotonic() - start < 10, e
        print("named:", e)
    with refused(epx.PeerError, "rank 1"):
        c.ata.poll()
    c.ata.destroy()


def a_killed_peer_is_named():
    out = processes(__file__, "rank_killed", 3, codes=[0, -signal.SIGKILL, 0])
    assert "named: EPX_ERR_PEER" in out[0] and "named: EPX_ERR_PEER" in out[2], out


as_rank([rank_sequence, rank_strided, rank_by_id, rank_internode, rank_killed])
if __name__ == "__main__":
    run_cases([the_sequence_of_sglang, one_rank_and_odd_numbers, strides_are_honoured, unique_ids_and_alltoall, between_hosts, refusals,
               a_killed_peer_is_named])
