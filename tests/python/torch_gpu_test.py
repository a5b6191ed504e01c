#!/usr/bin/env python3
"""pplx_kernels with torch: torch_gpu_test.py [--cpu] [--ranks N] [CASE...], with EPX_LIBRARY (and EPX_CUDA_MODULE) set.

Not part of CI, which has no torch. Runs N processes, by default one for each GPU; with more, they share GPUs and take turns; --cpu: all of it that needs no GPU, on CPU tensors. SGLang's
sequence of calls (a c10d group registered by name, zero-filled outputs, uint32 indices, bound_m, outputs of the full capacity),
compared bit for bit with a dense oracle in float64 whose sums are exact; CUDA graphs; torch.compile; epx itself with tensors; a killed peer.
Prints a line a case; exit 77: torch or the GPUs are not there.
"""
import os
import signal
import sys
import time
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))
try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
except ImportError:
    print("skip: torch is not installed")
    sys.exit(77)

import epx
import pplx_kernels as pplx

SEED = int(os.environ.get("EPX_TEST_SEED", "1"))
FP8 = torch.float8_e4m3fn


class Skip(Exception):
    """A case that cannot run here."""


class Env:
    """A rank: its device, and the c10d group."""

    def __init__(self, rank, n, cpu):
        self.rank, self.n, self.cpu = rank, n, cpu
        self.device = torch.device("cpu") if cpu else torch.device("cuda", rank % torch.cuda.device_count())

    def sync(self):
        if not self.cpu:
            torch.cuda.synchronize()

    def tensor(self, *args, **kw):
        return torch.tensor(*args, device=self.device, **kw)


# ---- the oracle: values whose products and sums are exact ----


class Batch:
    """Tokens of one source, the same on every rank that asks for them."""

    def __init__(self, seed, n, hidden, top_k, n_experts, dtype):
        g = torch.Generator().manual_seed(seed)
        self.n = n
        if dtype == FP8:  # codes of small whole numbers, scales powers of two
            self.x = torch.randint(-2, 3, (n, hidden), generator=g).float().to(FP8)
            self.scale = 2.0 ** torch.randint(-1, 2, (n, -(-hidden // 128)), generator=g).float()
        else:
            self.x, self.scale = (torch.randint(-8, 9, (n, hidden), generator=g).float() / 4).to(dtype), None
        self.ids = torch.stack([torch.randperm(n_experts, generator=g)[:top_k] for _ in range(n)]) if n else torch.zeros(0, top_k, dtype=torch.long)
        self.ids[torch.rand(self.ids.shape, generator=g) < 0.1] = -1
        self.weights = torch.randint(0, 9, (n, top_k), generator=g).float() / 8

    def values(self):
        """[n, H] float64, scales applied."""
        v = self.x.double()
        return v if self.scale is None else v * self.scale.double().repeat_interleave(128, 1)[:, :v.shape[1]]

    def dense(self, out_dtype):
        """Weighted sums of all experts, expert e multiplying by e % 3 + 1."""
        w = (self.weights * (self.ids >= 0)).double() * (self.ids % 3 + 1)
        return (w.sum(1)[:, None] * self.values()).to(out_dtype)


def rows_of(batches, expert):
    return [(s, t) for s, b in enumerate(batches) for t in range(b.n) if (b.ids[t] == expert).any()]


class Sequence:
    """What SGLang's dispatcher does with one AllToAll."""

    def __init__(self, env, x_dtype, hidden=256, n_experts=8, top_k=3, cap=16, dp=1, group="pplx_ep", y_dtype=None, out_dtype=None):
        self.env, self.dtype, self.hidden, self.n_experts, self.top_k, self.cap, self.dp = env, x_dtype, hidden, n_experts, top_k, cap, dp
        itemsize = torch.empty(0, dtype=x_dtype).element_size()
        self.out_dtype = out_dtype or (torch.bfloat16 if itemsize == 1 else x_dtype)
        self.y_dtype = y_dtype or self.out_dtype
        self.n_scales = -(-hidden // 128) if itemsize == 1 else 0
        self.ata = pplx.AllToAll.intranode(max_num_tokens=cap, num_experts=n_experts, experts_per_token=top_k, rank=env.rank, world_size=env.n,
                                           dp_size=dp, hidden_dim=hidden, hidden_dim_bytes=hidden * itemsize,
                                           hidden_dim_scale_bytes=self.n_scales * 4, group_name=group)
        self.el, self.rows = self.ata.num_local_experts, cap * (env.n // dp)
        self.first = env.rank * (n_experts // env.n) + min(env.rank, n_experts % env.n)

    def batches(self, step, sizes=None):
        g = torch.Generator().manual_seed(SEED * 31 + step)
        sizes = sizes or torch.randint(0, self.cap + 1, (self.env.n // self.dp,), generator=g).tolist()
        if step % 3 == 0:
            sizes = [0 if i == step % len(sizes) else s for i, s in enumerate(sizes)]
        return [Batch(SEED * 1000 + step * 10 + i, t, self.hidden, self.top_k, self.n_experts, self.dtype) for i, t in enumerate(sizes)]

    def inputs(self, batch, pad=0):
        """Device tensors of a batch, padded with `pad` rows that bound_m leaves out."""
        d, h = self.env.device, self.hidden
        x = torch.cat([batch.x.view(torch.uint8), torch.full((pad, batch.x.view(torch.uint8).shape[1]), 0x7F, dtype=torch.uint8)]).view(self.dtype)
        scale = None if batch.scale is None else torch.cat([batch.scale, torch.full((pad, batch.scale.shape[1]), float("nan"))]).to(d)
        ids = torch.cat([batch.ids, torch.full((pad, self.top_k), 7777)]).to(torch.int32).view(torch.uint32).to(d)
        weights = torch.cat([batch.weights, torch.full((pad, self.top_k), float("nan"))]).to(d)
        bound = torch.full((1,), batch.n, dtype=torch.int32).view(torch.uint32).to(d)
        assert x.shape[1] == h
        return x.to(d), scale, ids, weights, bound

    def outputs(self):
        d = self.env.device
        counts = torch.zeros(self.el, dtype=torch.int32, device=d)
        rows = torch.zeros(self.el, self.rows, self.hidden * torch.empty(0, dtype=self.dtype).element_size(), dtype=torch.uint8, device=d).view(self.dtype)
        scales = torch.zeros(self.el, self.rows, self.n_scales, device=d) if self.n_scales else None
        return counts, rows, scales, torch.zeros(self.cap, self.hidden, dtype=self.out_dtype, device=d)

    def experts(self, rows, scales):
        """Every row of the slab, whatever the count: as a masked product would. On the device, capturable."""
        e = torch.arange(self.el, device=self.env.device).reshape(-1, 1, 1) + self.first
        v = rows.float()
        if scales is not None:
            v = v * scales.repeat_interleave(128, 2)[:, :, :self.hidden]
        return (v * (e % 3 + 1)).to(self.y_dtype)

    def check_rows(self, batches, counts, rows, scales):
        counts, raw = counts.cpu(), rows.view(torch.uint8).cpu()
        scales = None if scales is None else scales.cpu()
        for e in range(self.el):
            want = rows_of(batches, self.first + e)
            assert counts[e] == len(want), (e, counts[e], len(want))
            for i, (src, t) in enumerate(want):
                assert torch.equal(raw[e, i], batches[src].x.view(torch.uint8)[t]), (e, i)
                assert scales is None or torch.equal(scales[e, i], batches[src].scale[t]), (e, i)
            assert not raw[e, len(want):].any(), "a row past the count was written"

    def check_out(self, own, out):
        want = own.dense(self.out_dtype)
        got = out.cpu()
        assert torch.equal(got[:own.n], want), (own.n, (got[:own.n].double() - want.double()).abs().max())
        assert not got[own.n:].any(), "a row past the tokens was written"

    def step(self, step, halves=False, padded=False):
        batches = self.batches(step)
        own = batches[self.env.rank // self.dp]
        x, x_scale, ids, weights, bound = self.inputs(own, self.cap - own.n if padded else 0)
        counts, rows, scales, out = self.outputs()
        flags = [(True, False), (False, True)] if halves else [(True, True)]
        for send, recv in flags:
            self.ata.dispatch(out_expert_num_tokens=counts, out_expert_x=rows, out_expert_x_scale=scales, dp_x=x, dp_x_scale=x_scale, indices=ids,
                              bound_m=bound, do_send=send, do_recv=recv)
        y = self.experts(rows, scales)
        for send, recv in flags:
            self.ata.combine(out_tokens=out, indices=ids, weights=weights, expert_y=y, bound_m=bound, do_send=send, do_recv=recv)
        self.env.sync()
        self.ata.poll()
        self.check_rows(batches, counts, rows, scales)
        self.check_out(own, out)

    def run(self, steps):
        for i in range(steps):
            self.step(i, halves=i % 4 == 1, padded=i % 2 == 0)
        self.ata.destroy()


def register(env, name, ranks, backend):
    """A new group over these ranks under a fixed name, as SGLang makes it."""
    group = dist.new_group(ranks, backend=backend)
    if env.rank in ranks:
        torch._C._distributed_c10d._register_process_group(name, group)
    return group


# ---- cases ----


def case_bf16(env):
    Sequence(env, torch.bfloat16).run(12)


def case_qwen3_shape(env):
    """The pull request's model: 128 experts, 8 a token, hidden 2048."""
    Sequence(env, torch.bfloat16, hidden=2048, n_experts=128, top_k=8, cap=128).run(2)


def case_dtypes(env):
    Sequence(env, torch.float16).run(4)
    Sequence(env, torch.bfloat16, y_dtype=torch.float32).run(4)
    Sequence(env, torch.bfloat16, out_dtype=torch.float16, y_dtype=torch.float16).run(4)


def case_fp8_scales(env):
    Sequence(env, FP8, hidden=512).run(8)
    Sequence(env, FP8, hidden=2048, n_experts=16, top_k=8, cap=64).run(3)


def case_fp8_f32_experts(env):
    Sequence(env, FP8, hidden=512, y_dtype=torch.float32).run(4)


def case_dp_groups(env):
    """Two ranks of a DP group hold the same tokens."""
    if env.n % 2:
        raise Skip("an odd number of ranks")
    try:
        Sequence(env, torch.bfloat16, dp=2).run(4)
    except epx.UnsupportedError as e:
        assert not env.cpu and "replicate is 2" in str(e), e
        raise Skip(f"refused by name: {e}")


def graph_of(env, work):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    env.sync()
    dist.barrier()
    with torch.cuda.graph(graph):
        work()
    env.sync()
    dist.barrier()
    return graph


def replays(env, dtype, n_replays):
    """One graph of a whole exchange, captured with other tokens; tokens, ids and bound_m change between replays; eager calls among them."""
    s = Sequence(env, dtype, hidden=512)
    x, x_scale, ids, weights, bound = s.inputs(Batch(5, s.cap, s.hidden, s.top_k, s.n_experts, dtype))
    counts, rows, scales, out = s.outputs()

    def work():
        rows.view(torch.uint8).zero_()
        if scales is not None:
            scales.zero_()
        out.zero_()
        s.ata.dispatch(counts, rows, scales, x, x_scale, ids, bound)
        s.ata.combine(out, ids, weights, s.experts(rows, scales), bound)

    graph = graph_of(env, work)
    for i in range(n_replays):
        if i % 10 == 9:
            s.step(i)
            continue
        batches = s.batches(i)
        own = batches[env.rank]
        for dst, src in zip((x, x_scale, ids, weights, bound), s.inputs(own, s.cap - own.n)):
            if dst is not None:
                dst.view(torch.uint8).copy_(src.view(torch.uint8))
        graph.replay()
        env.sync()
        s.ata.poll()
        s.check_rows(batches, counts, rows, scales)
        s.check_out(own, out)
    s.ata.destroy()


def case_graph_bf16(env):
    if env.cpu:
        raise Skip("needs GPUs")
    replays(env, torch.bfloat16, 60)


def case_graph_fp8(env):
    if env.cpu:
        raise Skip("needs GPUs")
    replays(env, FP8, 30)


def case_capture_refuses_set_up(env):
    if env.cpu:
        raise Skip("needs GPUs")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        try:
            Sequence(env, torch.bfloat16)
            raise AssertionError("an AllToAll was made inside a capture")
        except epx.StateError as e:
            assert "capture" in str(e), e
        torch.zeros(1, device=env.device).add_(1)
    Sequence(env, torch.bfloat16).run(2)


def case_compile(env):
    """torch.compile keeps the two operators in one graph, with and without inductor."""
    s = Sequence(env, torch.bfloat16)

    def layer(counts, rows, out, x, ids, weights, bound):
        s.ata.dispatch(counts, rows, None, x, None, ids, bound)
        s.ata.combine(out, ids, weights, rows * 2, bound)
        return out + 1

    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for step in range(1, 6, 2):
            batches = s.batches(step, [s.cap - 3] * env.n)
            own = batches[env.rank]
            x, _, ids, weights, bound = s.inputs(own)
            counts, rows, _, out = s.outputs()
            try:
                got = compiled(counts, rows, out, x, ids, weights, bound)
            except Exception as e:
                if backend == "inductor" and ("compiler" in str(e).lower() or "Triton" in type(e).__name__):
                    print(f"    rank {env.rank}: inductor has no compiler here: {type(e).__name__}", flush=True)
                    break
                raise
            env.sync()
            s.check_rows(batches, counts, rows, None)
            w = (own.weights * (own.ids >= 0)).double().sum(1)[:, None] * 2
            want = (w * own.values()).to(torch.bfloat16) + 1
            assert torch.equal(got[:own.n].cpu(), want), (backend, step)
        dist.barrier()
    s.ata.destroy()


def case_subset_and_spellings(env):
    """A group that is a part of the world; the world of nvshmem_init() in both spellings; all-to-all and barriers."""
    part = list(range(max(env.n - 1, 1)))
    group = register(env, "a_part", part, "gloo")
    if env.rank in part:
        few = Env(env.rank, len(part), env.cpu)
        few.device = env.device
        Sequence(few, torch.bfloat16, n_experts=6, group="a_part").run(3)
    dist.barrier()
    del group
    for by_id in (False, True):
        if by_id:
            uid = pplx.nvshmem_get_unique_id() if env.rank == 0 else pplx.nvshmem_alloc_empty_unique_id()
            dist.broadcast(uid, 0)
            pplx.nvshmem_init(uid, env.rank, env.n)
        else:
            pplx.nvshmem_init(global_rank=env.rank, local_rank=env.rank, world_size=env.n, device=env.device)
        assert (pplx.nvshmem_my_pe(), pplx.nvshmem_n_pes()) == (env.rank, env.n)
        Sequence(env, torch.bfloat16, group="nobody has registered this").run(2)
        source = pplx.nvshmem_malloc([env.n, 50], torch.bfloat16, env.device)
        dest = torch.zeros_like(source)
        source.copy_(torch.arange(env.n * 50).reshape(env.n, 50) % 64 + 64 * env.rank)
        pplx.nvshmem_alltoall(dest, source)
        pplx.nvshmem_barrier_all_on_current_stream()
        pplx.nvshmem_barrier_all()
        want = torch.stack([(torch.arange(env.n * 50).reshape(env.n, 50) % 64 + 64 * r)[env.rank] for r in range(env.n)])
        assert torch.equal(dest.cpu().long(), want.to(torch.bfloat16).long())
        env.sync()
        pplx.nvshmem_finalize()


def case_streams(env):
    """Work goes to the current stream; tensors that are dropped early stay until it is done."""
    s = Sequence(env, torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(2)] if not env.cpu else [None] * 2
    for i in range(1, 12):
        if i % 3 == 0:
            continue
        if env.cpu:
            s.step(i)
            continue
        with torch.cuda.stream(streams[i % 2]):
            torch.cuda._sleep(200000)
            s.step(i)
    s.ata.destroy()
    if not env.cpu:
        w = pplx.PyTorchStreamWrapper(streams[0])
        assert w.__cuda_stream__() == (0, streams[0].cuda_stream) and w.handle == streams[0].cuda_stream


def case_epx_with_tensors(env):
    """The package epx itself: tensors of torch, the same through DLPack and __cuda_array_interface__; lists; named refusals."""
    world = epx.World(rank=env.rank, n_ranks=env.n, allgather=lambda mine: gather(env, mine))
    group = world.group(device=-1 if env.cpu else env.device.index)
    plan = group.plan(max_tokens=4, hidden=64, top_k=2, n_experts=2 * env.n, token_dtype="f32", layout="expert_major")
    g = torch.Generator().manual_seed(9)
    x = torch.randint(-8, 9, (4, 64), generator=g).float().to(env.device)
    ids = torch.stack([torch.randperm(2 * env.n, generator=g)[:2] for _ in range(4)]).int().to(env.device)
    weights = torch.randint(0, 9, (4, 2), generator=g).float().to(env.device) / 8

    class Dlpack:
        def __init__(self, t):
            self.t = t

        def __dlpack__(self, **kw):
            return self.t.__dlpack__(**kw)

        def __dlpack_device__(self):
            return self.t.__dlpack_device__()

    class Interface:
        def __init__(self, t):
            self.device = t.device.index
            self.__cuda_array_interface__ = t.__cuda_array_interface__

    for kind in (lambda t: t, Dlpack) + (() if env.cpu else (Interface,)):
        rows, counts = torch.zeros(2, 4 * env.n, 64, device=env.device), torch.zeros(2, dtype=torch.int32, device=env.device)
        out = torch.zeros(4, 64, device=env.device)
        plan.dispatch(kind(x), kind(ids), kind(weights), out_x=kind(rows), out_counts=kind(counts))
        plan.combine(kind(rows), kind(out))
        env.sync()
        plan.poll()
        assert torch.equal(out, x * weights.sum(1)[:, None])
    wrong = torch.zeros(4, 64) if not env.cpu else torch.zeros(4, 32)
    try:
        plan.dispatch(wrong, ids, weights, out_x=rows, out_counts=counts)
        raise AssertionError("a wrong x was taken")
    except epx.ArgumentError as e:
        assert "x " in str(e), e
    if not env.cpu:
        for bad in ({"layout": "contiguous"}, {"renormalize": True}, {"hidden": 63}):
            try:
                group.plan(**dict(dict(max_tokens=4, hidden=64, top_k=2, n_experts=2 * env.n), **bad)).close()
                print(f"    rank {env.rank}: {bad} is built for GPUs", flush=True)
            except epx.UnsupportedError as e:
                assert list(bad)[0] in str(e), e
    plan.close(), group.close(), world.close()


def gather(env, mine):
    t = torch.tensor(list(mine) or [0], dtype=torch.uint8)
    parts = [torch.empty_like(t) for _ in range(env.n)]
    dist.all_gather(parts, t)
    return b"".join(bytes(p.tolist()) for p in parts)[:len(mine) * env.n]


def case_killed_peer(env):
    """Last: rank 1 dies; the others name it, their GPUs stay usable."""
    if env.n < 2:
        raise Skip("one rank")
    s = Sequence(env, torch.bfloat16)
    s.step(1), s.step(2)
    dist.barrier()
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for i in range(100000):
            s.step(3 + i)
            time.sleep(0.01)
        raise AssertionError("the exchange went on")
    except epx.PeerError as e:
        assert "rank 1" in str(e), e
    assert time.monotonic() - start < 10
    assert (torch.ones(4, device=env.device) * 2).sum().item() == 8
    print(f"    rank {env.rank}: named after {time.monotonic() - start:.2f} s", flush=True)


CASES = [case_bf16, case_qwen3_shape, case_dtypes, case_fp8_scales, case_fp8_f32_experts, case_dp_groups, case_graph_bf16, case_graph_fp8,
         case_capture_refuses_set_up, case_compile, case_subset_and_spellings, case_streams, case_epx_with_tensors, case_killed_peer]


def rank_main(rank, n, cpu, wanted, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_DEVICE_MAX_CONNECTIONS="32")
    env = Env(rank, n, cpu)
    if not cpu:
        torch.cuda.set_device(env.device)
    dist.init_process_group("gloo", rank=rank, world_size=n)
    register(env, "pplx_ep", list(range(n)), "gloo" if cpu else "cpu:gloo,cuda:nccl")
    bad = 0
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        start, word, note = time.monotonic(), "ok", ""
        try:
            case(env)
        except Skip as e:
            word, note = "skip", f": {e}"
        except epx.UnsupportedError as e:  # by name: what a build for GPUs does not have
            if cpu or "token_dtype is fp8_e4m3" not in str(e):
                word, bad = "FAILED", bad + 1
            else:
                word = "skip"
            note = f": {e}"
        except Exception:
            word, bad = "FAILED", bad + 1
            print(f"    rank {rank}, {case.__name__}: {traceback.format_exc()}", flush=True)
        if case is not case_killed_peer or n < 2:
            state = torch.tensor([word == "FAILED"], dtype=torch.int32)
            dist.all_reduce(state)
            if state.item() and word == "ok":
                word = "FAILED on another rank"
        if rank == 0:
            print(f"{word} {case.__name__} ({time.monotonic() - start:.2f} s){note}", flush=True)
    sys.stdout.flush()
    os._exit(1 if bad else 0)  # peers may be dead: no orderly end of process groups


def main():
    args = sys.argv[1:]
    cpu = "--cpu" in args
    n = int(args[args.index("--ranks") + 1]) if "--ranks" in args else 2 if cpu else torch.cuda.device_count()
    wanted = [a for a in args if a.startswith("case_")]
    if not cpu and n < 1:
        print("skip: no GPU")
        sys.exit(77)
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    print(f"torch {torch.__version__}, {n} ranks on {'CPU' if cpu else torch.cuda.get_device_name(0)}, seed {SEED}, libepx {epx.version()}", flush=True)
    started = [mp.get_context("spawn").Process(target=rank_main, args=(r, n, cpu, wanted, port)) for r in range(n)]
    for p in started:
        p.start()
    for p in started:
        p.join()
    codes = [p.exitcode for p in started]
    killed = -signal.SIGKILL if n > 1 and (not wanted or "case_killed_peer" in wanted) else 0
    want = [killed if r == 1 else 0 for r in range(n)]
    print("all passed" if codes == want else f"FAILED: exit codes {codes}, wanted {want}")
    sys.exit(0 if codes == want else 1)


if __name__ == "__main__":
    main()
