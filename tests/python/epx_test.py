#!/usr/bin/env python3
"""The Python package epx: epx_test.py [CASE...], with EPX_LIBRARY set and numpy installed; exit 77 without numpy.

Exchanges against an oracle in numpy, ranks as threads and as processes; every kind of array; refusals; a killed peer.
"""
import array
import ctypes
import ctypes.util
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time

try:
    import numpy as np
except ImportError:
    print("skip: numpy is not installed (Debian: python3-numpy)")
    sys.exit(77)
from ranks import SEED, Batch, answer_of, as_rank, bf16, combined, expert_rows, narrow, owners, processes, refused, run_cases, threads, widen

import epx
from epx import _errors, _library

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
NUMPY = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16, "fp8_e4m3": np.uint8}


def value(x):
    """What a row stands for in these tests; fp8 codes count as integers here, since nobody decodes them."""
    return widen(x)


def experts_work(plan, counts, rows, mine):
    """Expert outputs in the layout of rows; offsets() says where they are."""
    y = np.zeros(rows.shape, NUMPY[plan.expert_dtype])
    flat_in, flat_out = rows.reshape(-1, rows.shape[-1]), y.reshape(-1, rows.shape[-1])
    off = plan.offsets()
    for e, expert in enumerate(mine):
        part = slice(off[e], off[e] + int(counts[e]))
        flat_out[part] = narrow(answer_of(expert, value(flat_in[part])), y.dtype)
    return y


def check_dispatch(batches, mine, counts, rows, scales, offsets):
    flat = rows.reshape(-1, rows.shape[-1])
    for e, expert in enumerate(mine):
        want = expert_rows(batches, expert)
        assert counts[e] == len(want), (expert, counts[e], len(want))
        for i, (src, t) in enumerate(want):
            at = offsets[e] + i
            assert np.array_equal(flat[at], batches[src].x[t]), (expert, i)
            if scales is not None:
                assert np.array_equal(scales.reshape(-1, scales.shape[-1])[at], batches[src].scale[t]), (expert, i)


def one_exchange(plan, batches, source, halves, late, with_add):
    """Dispatch, experts, combine of one rank, compared with the oracle."""
    c, info, b = plan.config, plan.info, batches[source]
    mine = np.flatnonzero(owners(c.n_experts, plan.group.n_ranks) == plan.group.rank)
    shape = (info.n_local_experts, info.row_cap, c.hidden) if c.layout == "expert_major" else (info.max_rows, c.hidden)
    rows, counts = np.full(shape, 7, NUMPY[plan.wire_dtype]), np.full(len(mine), -1, np.int32)
    histogram = np.zeros(c.n_experts, np.int32)
    scales = np.zeros(shape[:-1] + (info.scale_words,), np.float32) if info.scale_words else None
    recv = dict(out_x=rows, out_scale=scales, out_counts=counts, out_histogram=histogram)
    given = np.full_like(b.weights, np.nan) if late else b.weights
    if halves:
        plan.dispatch_send(b.x, b.ids, given, x_scale=b.scale)
        plan.dispatch_recv(**recv)
    else:
        plan.dispatch(b.x, b.ids, given, x_scale=b.scale, **recv)
    check_dispatch(batches, mine, counts, rows, scales, plan.offsets())
    assert np.array_equal(histogram, [len(expert_rows(batches, e)) for e in range(c.n_experts)])
    y = experts_work(plan, counts, rows, mine)
    result = NUMPY[plan.result_dtype]
    out = np.full((b.n + 1, c.hidden), 3, result)
    add = narrow(np.full((b.n, c.hidden), 0.5), result) if with_add else None
    weights = b.weights if late else None
    if halves:
        plan.combine_send(y)
        plan.combine_recv(out, add=add, combine_weights=weights)
    else:
        plan.combine(y, out, add=add, combine_weights=weights)
    want = combined(b, lambda t, e: answer_of(e, value(b.x[t]))) + (0.5 if with_add else 0)
    assert np.array_equal(out[:b.n], narrow(want, result)), (out[:b.n], want)
    assert (out[b.n] == 3).all(), "a row past the tokens was written"


# ---- cases ----


def structs_are_those_of_the_header():
    """Names and order of every struct, and every status, as the C headers have them."""
    text = open(os.path.join(SOURCE, "include/epx/epx.h")).read() + open(os.path.join(SOURCE, "include/epx/epx_device.h")).read()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    pairs = {"epx_world_config_t": _library.WorldConfig, "epx_group_caps_t": _library.GroupCaps, "epx_plan_config_t": _library.PlanConfig,
             "epx_io_t": _library.Io, "epx_plan_info_t": _library.PlanInfo, "epx_plan_stats_t": _library.PlanStats,
             "epx_list_entry_t": _library.ListEntry, "epx_lists_t": _library.Lists, "epx_component_t": _library.Component}
    for name, struct in pairs.items():
        body = re.search(r"typedef struct \{([^{}]*)\} " + name + ";", text).group(1)
        fields = [re.search(r"(\w+)\)?\s*(\([^)]*\))?$", d.strip()).group(1) for part in body.split(";") if part.strip()
                  for d in ([part] if "(" in part else part.split(","))]
        assert fields == [f[0] for f in struct._fields_], (name, fields)
    listed = re.findall(r"X\((EPX_\w+),\s*(-?\d+)", open(os.path.join(SOURCE, "include/epx/epx_status.h")).read())
    want = {int(n): s for s, n in listed if int(n) < 0}
    assert want == {code: kind.status for code, kind in _errors.BY_CODE.items()}


def library_is_found_or_the_error_says_what_was_tried():
    code = "import epx\ntry: print(epx.version(), epx.library_path())\nexcept epx.LibraryNotFoundError as e: print('none:', e)"
    env = dict(os.environ, PYTHONPATH=os.path.join(SOURCE, "python"), EPX_LIBRARY="/nowhere/libepx.so.0")
    run = lambda: subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)  # noqa: E731
    out = run().stdout
    assert out.startswith("none:") and "/nowhere/libepx.so.0: no such file" in out and "EPX_LIBRARY" in out, out
    env["EPX_LIBRARY"] = ctypes.util.find_library("c") or "libc.so.6"
    assert "epx_version" in run().stdout, "a library that is not libepx"
    folder = os.path.dirname(epx.library_path())
    env["EPX_LIBRARY"], env["LD_LIBRARY_PATH"] = "", folder
    out = run().stdout
    assert out.startswith("0.1.0 "), out


def exchange_matrix():
    dtypes = [("f32", {}), ("f16", {}), ("bf16", {}), ("bf16", {"expert_dtype": "f32", "combine_dtype": "f32"}),
              ("fp8_e4m3", {"combine_dtype": "bf16"})]
    numbers = itertools.count()
    for w, (token, more), layout, combine in itertools.product((1, 2, 3), dtypes, ("expert_major", "contiguous"), ("exact", "prereduced")):
        i = next(numbers)
        n_experts, hidden = (7, 40) if i % 2 else (4, 136)
        late = combine == "exact" and i % 3 == 0
        config = epx.PlanConfig(max_tokens=5, hidden=hidden, top_k=3, n_experts=n_experts, token_dtype=token, layout=layout, combine=combine,
                                align=4 if layout == "contiguous" else 1, timeout_s=20, **more)

        def body(world, rank):
            with world.group() as group, group.plan(config) as plan:
                for step in range(4):
                    sizes = [(5, 0, 3), (0, 0, 0), (1, 5, 0), (2, 4, 5)][step]
                    batches = [Batch(SEED * 1000 + i * 10 + step + 100 * s, sizes[s], hidden, 3, n_experts, NUMPY[token],
                                     small=combine == "prereduced" or token == "fp8_e4m3") for s in range(w)]
                    one_exchange(plan, batches, rank, step % 2, late, step > 1)

        threads(w, body)


def replicated_tokens():
    """Pairs of ranks hold the same tokens and all get the results."""
    def body(world, rank):
        with world.group() as group, group.plan(max_tokens=4, hidden=16, top_k=2, n_experts=5, layout="expert_major", replicate=2) as plan:
            batches = [Batch(SEED + s, 4 - s, 16, 2, 5, np.float32) for s in range(2)]
            assert plan.info.row_cap == 8
            one_exchange(plan, batches, rank // 2, rank % 2 * 0, False, False)

    threads(4, body)


def lists_and_rows_in_place():
    def body(world, rank):
        with world.group() as group, group.plan(max_tokens=4, hidden=8, top_k=2, n_experts=4) as plan:
            batches = [Batch(SEED + 7 * s, 4, 8, 2, 4, np.float32) for s in range(2)]
            b = batches[rank]
            inside = np.asarray(plan.input())
            assert inside.shape == (4, 8)
            inside[:] = b.x
            plan.dispatch(inside, b.ids, b.weights)
            lists = plan.lists()
            want = [row for e in np.flatnonzero(owners(4, 2) == rank) for row in expert_rows(batches, e)]
            assert lists.n_rows == len(want) and np.asarray(lists.entries).tolist() == [list(w) for w in want]
            assert [lists.entry(i) for i in range(lists.n_rows)] == want
            y = np.zeros((lists.n_rows, 8), np.float32)
            off = np.asarray(lists.expert_off)
            for e in range(lists.n_local_experts):
                for i in range(off[e], off[e + 1]):
                    src, t = want[i]
                    row = np.asarray(lists.row(i))
                    assert np.array_equal(row, batches[src].x[t])
                    y[i] = answer_of(2 * rank + e, row)
            with refused(epx.ArgumentError, "wire dtype is f32"):
                lists.scales(0)
            out = np.zeros((4, 8), np.float32)
            plan.combine(y, out)
            assert np.array_equal(out, combined(b, lambda t, e: answer_of(e, b.x[t])))
            s = plan.stats
            assert s.n_dispatches == s.n_combines == 1 and sum(s.rows_received) == len({w for w in want})

    threads(2, body)


def channels_and_aborts():
    def body(world, rank):
        with world.group() as group, group.plan(max_tokens=2, hidden=4, top_k=1, n_experts=2, layout="expert_major", n_channels=2) as plan:
            x = [np.full((2, 4), 1 + rank + 10 * c, np.float32) for c in range(2)]
            ids, weights = np.array([[0], [1]], np.uint32), np.ones((2, 1), np.float32)
            rows, counts = np.zeros((2, 1, 4, 4), np.float32), np.zeros((2, 1), np.int32)
            for c in (0, 1):
                plan.dispatch_send(x[c], ids, weights, channel=c)
            for c in (1, 0):
                plan.dispatch_recv(out_x=rows[c], out_counts=counts[c], channel=c)
                assert counts[c, 0] == 2 and rows[c, 0, :2, 0].tolist() == [1 + 10 * c, 2 + 10 * c]
            out = np.zeros((2, 4), np.float32)
            with refused(epx.StateError, "expected: combine_send"):
                plan.dispatch_recv(out_x=rows[0], out_counts=counts[0])
            for c in (0, 1):
                plan.combine(rows[c], out, channel=c)
                assert np.array_equal(out, x[c])
            group.barrier()
            if rank == 1:
                plan.abort()
            with refused(epx.AbortedError, "EPX_ERR_ABORTED"):
                while True:
                    plan.poll()
            with refused(epx.AbortedError):
                plan.dispatch_send(x[0], ids, weights)
            group.barrier()
            plan.recover()
            plan.poll()

    threads(2, body)


class OnlyDlpack:
    def __init__(self, a):
        self.a = a

    def __dlpack__(self, **_):
        return self.a.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


class OnCuda:
    def __init__(self, a):
        self.__cuda_array_interface__ = a.__array_interface__


def every_kind_of_array():
    with epx.World("self") as world, world.group() as group, group.plan(max_tokens=2, hidden=3, top_k=1, n_experts=1,
                                                                        layout="expert_major") as plan:
        x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
        ids, weights = np.zeros((2, 1), np.int32), np.full((2, 1), 2, np.float32)
        kinds = {"numpy": lambda a: a, "dlpack": OnlyDlpack, "memoryview": memoryview, "read only": lambda a: memoryview(a).toreadonly(),
                 "array": lambda a: memoryview(array.array(a.dtype.char, a.ravel().tolist())).cast("B").cast(a.dtype.char, a.shape)}
        for name, kind in kinds.items():
            rows, counts, out = np.zeros((1, 2, 3), np.float32), np.zeros(1, np.int32), np.zeros((2, 3), np.float32)
            plan.dispatch(kind(x), kind(ids), kind(weights), out_x=rows, out_counts=memoryview(counts))
            plan.combine(kind(rows), OnlyDlpack(out) if name == "dlpack" else out)
            assert np.array_equal(out, 2 * x), (name, out)
        rows, counts = np.zeros((1, 2, 3), np.float32), np.zeros(1, np.int32)
        good = dict(x=x, ids=ids, weights=weights, out_x=rows, out_counts=counts)
        for field, bad, *parts in [
            ("x", x.astype(np.float64), "x has dtype float64", "float32"), ("x", x[:, :2], "[2, 2]", "[any, 3]"),
            ("x", np.asfortranarray(x), "strides", "C order"), ("x", "text", "str", "__dlpack__"), ("x", OnCuda(x), "CUDA device 0", "the CPU"),
            ("x", x.astype(">f4"), "byte order"), ("x", None, "x is None"), ("ids", ids.astype(np.int64), "int64", "int32, uint32"),
            ("ids", ids[:1], "[1, 1]", "[2, 1]"), ("weights", ids, "int32", "float32"), ("out_x", x, "[2, 3]", "[1, 2, 3]"),
            ("out_counts", np.zeros(2, np.int32), "[2]", "[1]"), ("n_tokens", 3, "n_tokens is 3", "2 rows"),
            ("ids", ids + 1, "ids[token 0][k 0] is 1", "0"), ("x_scale", x, "[2, 3]"), ("stream", 5, "stream"),
            ("n_tokens_device", np.ones(1, np.uint32), "n_tokens_device"), ("channel", 1, "channel is 1")]:
            with refused(epx.ArgumentError, *parts):
                plan.dispatch(**dict(good, **{field: bad}))
        plan.dispatch(**dict(good, n_tokens=1))  # after all refusals it still works
        assert counts[0] == 1
        for bad, *parts in [((rows[0], x), "y has", "[2, 3]", "[1, 2, 3]"), ((rows, x[:0]), "out has", "[0, 3]", "1 or more"),
                            ((rows, x.astype(np.float16)), "float16"), ((None, x), "y is None")]:
            with refused(epx.ArgumentError, *parts):
                plan.combine(*bad)
        plan.combine(rows, x)
    with refused(epx.ArgumentError, "closed"):
        plan.info


def fields_are_refused_by_name():
    with epx.World("self") as world, world.group() as group:
        good = dict(max_tokens=2, hidden=3, top_k=1, n_experts=2)
        for kind, field, bad, *parts in [
            (epx.ArgumentError, "layout", "diagonal", 'layout is "diagonal"', "expert_major"), (epx.ArgumentError, "token_dtype", "f64", "f64", "bf16"),
            (epx.ArgumentError, "top_k", 65, "top_k is 65", "1 to 64"), (epx.ArgumentError, "slot_rank", [0], "slot_rank has 1", "2 slots"),
            (epx.UnsupportedError, "scale_block", 513, "scale_block is 513", "512"), (epx.ArgumentError, "backend", "teleport", "teleport"),
            (epx.ArgumentError, "wire_dtype", "f16", "wire_dtype is f16"), (TypeError, "tokens", 4, "tokens")]:
            with refused(kind, *parts):
                group.plan(**dict(good, **{field: bad}))
        assert epx.plan_bytes(1, **good) == group.plan_bytes(**good) > 0
        with refused(epx.UnsupportedError, "device is 0"):
            world.group(device=0)
        with refused(epx.ArgumentError, "n_bytes is 257", "256"):
            group.allgather(bytes(257))
        assert epx.plan_bytes(4, n_here=2, **good) > epx.plan_bytes(4, **good) == epx.plan_bytes(4, n_here=4, **good)
        with refused(epx.ArgumentError, "n_here"):
            epx.plan_bytes(4, n_here=5, **good)
        assert group.allgather(b"abc") == [b"abc"] and group.caps.max_top_k == 64 and group.dead_rank is None
    for kind, call, *parts in [
        (epx.ArgumentError, lambda: epx.World("carrier-pigeon"), "carrier-pigeon", "tcp:HOST:PORT"),
        (epx.UnsupportedError, lambda: epx.World("file:x"), "file:x"), (epx.ArgumentError, lambda: epx.World.local(0), "n_ranks is 0"),
        (epx.ArgumentError, lambda: epx.World("self", allgather=lambda b: b), "one of the two"),
        (epx.ArgumentError, lambda: epx.World("self", timeout_s=-1), "timeout_s is -1"),
        (epx.ArgumentError, lambda: epx.World("env"), "no launcher")]:
        with refused(kind, *parts):
            call()
    names = [c.name for c in epx.components()]
    assert "onesided" in names and "shm" in names


def worlds_from_callbacks():
    """The caller's own all-gather; an exception in it reaches the caller of World()."""
    n, meet, blobs = 2, threading.Barrier(2), [b"", b""]
    errors = []

    def rank_body(rank):
        def gather(mine):
            blobs[rank] = mine
            meet.wait()
            out = list(blobs)
            meet.wait()
            return out if rank else b"".join(out)

        try:
            with epx.World(rank=rank, n_ranks=n, allgather=gather) as world, world.group() as group:
                assert group.allgather(bytes([rank])) == [b"\0", b"\1"]
                assert (world.group([1]) is None) == (rank == 0)
        except BaseException as e:
            errors.append(e)

    ts = [threading.Thread(target=rank_body, args=(r,)) for r in range(n)]
    for t in ts:
        t.start()
    for t in ts:
        t.join(20)
    assert not errors, errors

    def broken(_mine):
        raise KeyError("the key-value store is down")

    try:
        epx.World(rank=0, n_ranks=2, allgather=broken)
        raise AssertionError("nothing was raised")
    except epx.TransferError as e:
        assert isinstance(e.__cause__, KeyError), e.__cause__
    try:
        epx.World(rank=0, n_ranks=2, allgather=lambda mine: mine)
        raise AssertionError("nothing was raised")
    except epx.TransferError as e:
        assert "of each of 2 ranks" in str(e.__cause__), e.__cause__


def rank_exchange(rank, n):
    """A process: the matrix's exchange over tcp and shared memory."""
    with epx.World("tcp:" + os.environ["EPX_INIT_ADDR"], rank=rank, n_ranks=n) as world, world.group() as group:
        with group.plan(max_tokens=6, hidden=24, top_k=2, n_experts=5, token_dtype="bf16", layout="expert_major") as plan:
            for step in range(20):
                batches = [Batch(SEED * 100 + step + 50 * s, (step + s * 3) % 7, 24, 2, 5, np.uint16) for s in range(n)]
                one_exchange(plan, batches, rank, step % 2, False, False)


def processes_over_tcp():
    processes(__file__, "rank_exchange", 3)


def rank_killed(rank, n):
    """Rank 1 dies; the others name it."""
    with epx.World("tcp:" + os.environ["EPX_INIT_ADDR"], rank=rank, n_ranks=n) as world, world.group() as group:
        plan = group.plan(max_tokens=1, hidden=4, top_k=1, n_experts=3, layout="expert_major", timeout_s=30)
        x, ids, weights = np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
        rows, counts = np.zeros((1, 3, 4), np.float32), np.zeros(1, np.int32)
        plan.dispatch(x, ids, weights, out_x=rows, out_counts=counts)
        plan.combine(rows, x)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            plan.dispatch(x, ids, weights, out_x=rows, out_counts=counts)
            plan.combine(rows, x)
            raise AssertionError("the exchange went on without rank 1")
        except epx.PeerError as e:
            assert e.status == "EPX_ERR_PEER" and e.code == -302 and "rank 1" in e.message, e
            assert isinstance(e, ConnectionError)
            print("named:", e)
        assert time.monotonic() - start < 10
        assert group.dead_rank == 1
        plan.close()


def a_killed_peer_is_named():
    out = processes(__file__, "rank_killed", 3, codes=[0, -signal.SIGKILL, 0])
    assert "named: EPX_ERR_PEER" in out[0] and "named: EPX_ERR_PEER" in out[2], out


def a_missing_peer_is_a_timeout():
    def body(world, rank):
        with world.group() as group:
            plan = group.plan(max_tokens=1, hidden=4, top_k=1, n_experts=2, timeout_s=0.3)
            x, ids, weights = np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
            if rank == 0:
                with refused(epx.TimeoutError, "rank 1", "dispatch"):
                    plan.dispatch(x, ids, weights)
                assert issubclass(epx.TimeoutError, TimeoutError)
            group.barrier()
            with refused(epx.Error, "EPX_ERR_"):
                plan.dispatch(x, ids, weights)
            plan.close()

    threads(2, body)


def the_example_of_the_documentation_runs():
    text = open(os.path.join(SOURCE, "docs/python.md")).read()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) >= 2
    env = dict(os.environ, PYTHONPATH=os.path.join(SOURCE, "python"))
    for block in blocks:
        run = subprocess.run([sys.executable, "-c", block], env=env, capture_output=True, text=True, timeout=30)
        assert run.returncode == 0, run.stderr
        wanted = re.findall(r"#> (.*)", block)
        assert wanted and run.stdout.split("\n")[:-1] == wanted, (run.stdout, wanted)


as_rank([rank_exchange, rank_killed])
if __name__ == "__main__":
    run_cases([structs_are_those_of_the_header, library_is_found_or_the_error_says_what_was_tried, exchange_matrix, replicated_tokens,
               lists_and_rows_in_place, channels_and_aborts, every_kind_of_array, fields_are_refused_by_name, worlds_from_callbacks,
               processes_over_tcp, a_killed_peer_is_named, a_missing_peer_is_a_timeout, the_example_of_the_documentation_runs])
