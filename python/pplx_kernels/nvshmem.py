"""The calls of pplx_kernels.nvshmem. There is no NVSHMEM behind them: ranks meet over libepx, memory is ordinary memory, and the exchange
of nvshmem_alltoall() is libepx's dispatch."""
import inspect
from typing import Any, Sequence

import epx
from epx._arrays import view

from . import _bootstrap
from ._tensors import copy, full, is_tensor, numpy_module, torch_module

__all__ = [
    "nvshmem_get_unique_id", "nvshmem_alloc_empty_unique_id", "nvshmem_unique_id_size", "nvshmem_init", "nvshmem_finalize",
    "nvshmem_my_pe", "nvshmem_n_pes", "nvshmem_malloc", "nvshmem_alltoall", "nvshmem_barrier_all",
    "nvshmem_barrier_all_on_current_stream", "PyTorchStreamWrapper"
]


class PyTorchStreamWrapper:
    """A stream of torch with the protocol __cuda_stream__ of NVIDIA's Python libraries."""

    def __init__(self, pt_stream: Any):
        self.pt_stream = pt_stream
        self.handle = pt_stream.cuda_stream

    def __cuda_stream__(self) -> tuple:
        return (0, self.pt_stream.cuda_stream)


def _bytes_array(data: bytes) -> Any:
    torch = torch_module()
    if torch is not None:
        return torch.tensor(list(data), dtype=torch.uint8)
    return numpy_module().frombuffer(bytearray(data), dtype="uint8")


def nvshmem_unique_id_size() -> int:
    """Bytes of an id."""
    return _bootstrap.ID_BYTES


def nvshmem_get_unique_id() -> Any:
    """[128] uint8 (of torch if that is loaded, else numpy) for rank 0 to broadcast: where it will listen, and a secret."""
    return _bytes_array(_bootstrap.new_id())


def nvshmem_alloc_empty_unique_id() -> Any:
    """[128] uint8 zeros, to receive rank 0's id."""
    return _bytes_array(bytes(_bootstrap.ID_BYTES))


def _by_launcher(global_rank: int, local_rank: int, world_size: int, device: Any = None) -> None:
    torch = torch_module()
    if device is None:
        device = local_rank if torch is not None and torch.cuda.is_available() else "cpu"
    where = _bootstrap.device_index(device)
    _begin(lambda: _bootstrap.world_of_launcher(global_rank, world_size), global_rank, world_size, where)


def _by_id(uid: Any, rank: int, world_size: int) -> None:
    where = _bootstrap.device_index(None)
    _begin(lambda: _bootstrap.world_of_id(uid, rank, world_size), rank, world_size, where)


def _begin(make: Any, rank: int, world_size: int, device: int) -> None:
    now = _bootstrap.current
    if now is not None:
        if (now.rank, now.n_ranks, now.device) == (rank, world_size, device):
            return
        raise epx.StateError(f"nvshmem_init() was called before with rank {now.rank} of {now.n_ranks} on device {now.device}, now with {rank} of "
                             f"{world_size} on device {device}; call nvshmem_finalize() in between")
    _bootstrap.current = _bootstrap.Nvshmem(make(), device)


def nvshmem_init(*args: Any, **kwargs: Any) -> None:
    """Meet the other ranks. Collective. Two spellings:

    nvshmem_init(uid, rank, world_size)                                uid: rank 0's nvshmem_get_unique_id(), broadcast
    nvshmem_init(global_rank=, local_rank=, world_size=, device=)      through torch.distributed's default group, or EPX_INIT_ADDR

    A second call with the same ranks does nothing; with others it is a StateError.
    """
    by_launcher = "global_rank" in kwargs or (bool(args) and isinstance(args[0], int))
    spelling = _by_launcher if by_launcher else _by_id
    try:
        bound = inspect.signature(spelling).bind(*args, **kwargs)
    except TypeError as e:
        raise epx.ArgumentError(f"nvshmem_init(): {e}; legal: (uid, rank, world_size), or global_rank, local_rank, world_size, device") from None
    spelling(*bound.args, **bound.kwargs)


def _state(call: str) -> _bootstrap.Nvshmem:
    if _bootstrap.current is None:
        raise epx.StateError(f"{call}() before nvshmem_init()")
    return _bootstrap.current


def nvshmem_finalize() -> None:
    """End what nvshmem_init() began. Destroy the AllToAll objects first. Without nvshmem_init() it does nothing."""
    if _bootstrap.current is not None:
        _bootstrap.current.close()
        _bootstrap.current = None


def nvshmem_my_pe() -> int:
    return _state("nvshmem_my_pe").rank


def nvshmem_n_pes() -> int:
    return _state("nvshmem_n_pes").n_ranks


def nvshmem_malloc(shape: Sequence[int], dtype: Any, device: Any = None) -> Any:
    """Zeros of this shape: ordinary memory, since nvshmem_alltoall() needs no other. dtype and device of torch, or of numpy."""
    _state("nvshmem_malloc")
    torch = torch_module()
    if torch is not None and isinstance(dtype, torch.dtype):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return numpy_module().zeros(tuple(shape), dtype)


# ---- all-to-all of equal blocks: token i of a rank goes to expert i, which is rank i's only one ----


class _Blocks:
    """Buffers of one block size, in bf16 words of 2 bytes; blocks are padded to 16 bytes."""

    def __init__(self, s: _bootstrap.Nvshmem, tensor: bool, block_bytes: int):
        n = s.n_ranks
        self.hidden = max((block_bytes + 15) // 16 * 8, 8)
        self.plan = s.group.plan(max_tokens=n, hidden=self.hidden, top_k=1, n_experts=n, token_dtype="bf16", layout="expert_major")

        def make(shape: Sequence[int], dtype: str, value: float) -> Any:
            return full(tensor, s.device, shape, dtype, value)

        self.x, self.back = make((n, self.hidden * 2), "uint8", 0), make((n, self.hidden * 2), "uint8", 0)
        self.out = make((n * n, self.hidden * 2), "uint8", 0)
        self.weights, self.counts = make((n, 1), "float32", 1), make((1,), "int32", 0)
        self.ids = make((n, 1), "int32", 0)
        for i in range(n):
            self.ids[i, 0] = i

    def view(self, array: Any, *shape: int) -> Any:
        torch = torch_module()
        words = array.view(torch.bfloat16) if is_tensor(array) else array.view("uint16")
        return words.reshape(*shape, self.hidden)


def _as_bytes(array: Any, n_ranks: int, field: str) -> Any:
    if len(array.shape) == 0 or array.shape[0] != n_ranks:
        raise epx.ArgumentError(f"{field} has shape {list(array.shape)}; legal: [{n_ranks}, ...], one block for each rank")
    if not view(array, field).contiguous():
        raise epx.ArgumentError(f"{field} is not contiguous; legal: C order")
    flat = array.reshape(n_ranks, -1)
    return flat.view(torch_module().uint8) if is_tensor(array) else flat.view("uint8")


def nvshmem_alltoall(dest: Any, source: Any) -> None:
    """dest[i] of this rank = source[this rank] of rank i, for contiguous [n_pes, ...] arrays of one dtype. Collective; on a GPU it is
    put on torch's current stream. The first call with a block size makes a plan (not inside a graph capture)."""
    s = _state("nvshmem_alltoall")
    src, dst = _as_bytes(source, s.n_ranks, "source"), _as_bytes(dest, s.n_ranks, "dest")
    block = int(src.shape[1])
    if dst.shape != src.shape:
        raise epx.ArgumentError(f"dest has {dst.shape[1]} bytes a block; legal: the {block} of source")
    key = (block, is_tensor(source))
    if key not in s.plans:
        b = _Blocks(s, is_tensor(source), block)
        s.plans[key] = (b.plan, b)
    b = s.plans[key][1]
    copy(b.x[:, :block], src)
    rows = b.view(b.out, 1, s.n_ranks * s.n_ranks)
    b.plan.dispatch(b.view(b.x, s.n_ranks), b.ids, b.weights, out_x=rows, out_counts=b.counts)
    copy(dst, b.out[:s.n_ranks, :block])
    b.plan.combine(rows, b.view(b.back, s.n_ranks))


def nvshmem_barrier_all() -> None:
    """Wait on the host until all ranks are here; on a GPU, after the work of the current device."""
    s = _state("nvshmem_barrier_all")
    torch = torch_module()
    if s.device >= 0 and torch is not None:
        torch.cuda.synchronize(s.device)
    s.group.barrier()


def nvshmem_barrier_all_on_current_stream() -> None:
    """On a GPU: later work of torch's current stream starts when all ranks' streams are here. On the CPU: nvshmem_barrier_all()."""
    s = _state("nvshmem_barrier_all_on_current_stream")
    if s.device < 0:
        s.group.barrier()
        return
    torch = torch_module()
    if torch is None:
        raise epx.StateError("nvshmem_barrier_all_on_current_stream() on a GPU needs torch")
    if s.barrier_block is None:
        s.barrier_block = torch.zeros((2, s.n_ranks, 16), dtype=torch.uint8, device=f"cuda:{s.device}")
    nvshmem_alltoall(s.barrier_block[1], s.barrier_block[0])
