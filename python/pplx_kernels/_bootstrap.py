"""How ranks meet: through a group that torch.distributed has registered under a name, or through the world of nvshmem_init()."""
import os
import secrets
import socket
from typing import Any, Callable, Optional, Tuple

import epx
from epx._arrays import view

from ._tensors import torch_module

ID_BYTES = 128
_MAGIC = b"EPXU"


def distributed() -> Any:
    """torch.distributed when it is initialised in this process, else None."""
    torch = torch_module()
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed


# ---- groups of torch.distributed ----


def _has_cpu(pg: Any) -> bool:
    try:
        pg._get_backend(torch_module().device("cpu"))
        return True
    except RuntimeError:
        return False


def _gather_over(pg: Any) -> Callable[[bytes], bytes]:
    """All-gather of bytes over a process group: its CPU backend, or else its CUDA backend and the current device."""
    torch = torch_module()
    where = torch.device("cpu") if _has_cpu(pg) else torch.device("cuda", torch.cuda.current_device())

    def gather(mine: bytes) -> bytes:
        t = torch.tensor(list(mine) or [0], dtype=torch.uint8).to(where)
        parts = [torch.empty_like(t) for _ in range(pg.size())]
        torch.distributed.all_gather(parts, t, group=pg)
        return b"".join(bytes(p.cpu().tolist()) for p in parts)[:len(mine) * pg.size()]

    return gather


def registered_group(name: str) -> Any:
    """The c10d group of that name, or None."""
    if distributed() is None:
        return None
    c10d: Any = torch_module()._C._distributed_c10d
    try:
        return c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def world_over(pg: Any) -> epx.World:
    """A world whose ranks are those of a process group. Collective over it."""
    return epx.World(rank=pg.rank(), n_ranks=pg.size(), allgather=_gather_over(pg))


# ---- unique ids: where rank 0 listens, and a secret ----


def _meeting_place() -> str:
    """EPX_INIT_ADDR; or a free port of MASTER_ADDR, if that is this host; or of the loopback address."""
    given = os.environ.get("EPX_INIT_ADDR")
    if given:
        return given
    host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    for name in (host, "127.0.0.1"):
        try:
            address = socket.gethostbyname(name)
            with socket.socket() as s:
                s.bind((address, 0))
                return f"{address}:{s.getsockname()[1]}"
        except OSError:
            continue
    raise epx.SystemFailure("no free port of the loopback address; set EPX_INIT_ADDR to HOST:PORT of this host")


def new_id() -> bytes:
    address = _meeting_place().encode()
    token = (os.environ.get("EPX_JOIN_TOKEN") or secrets.token_hex(16)).encode()
    text = _MAGIC + bytes([len(address), len(token)]) + address + token
    if len(text) > ID_BYTES:
        raise epx.ArgumentError(f"address and token have {len(address) + len(token)} bytes; legal: {ID_BYTES - 6} at most "
                                "(EPX_INIT_ADDR, EPX_JOIN_TOKEN)")
    return text.ljust(ID_BYTES, b"\0")


def read_id(uid: Any) -> Tuple[str, str]:
    """Address and token of an id that nvshmem_get_unique_id() made."""
    import ctypes
    if hasattr(uid, "is_cuda") and uid.is_cuda:
        uid = uid.cpu()
    v = view(uid, "uid")
    raw = ctypes.string_at(v.ptr, ID_BYTES) if v.dtype in ("uint8", "int8") and v.shape == (ID_BYTES,) and v.device < 0 else b""
    if raw[:4] != _MAGIC:
        raise epx.ArgumentError(f"uid has dtype {v.dtype}, shape {list(v.shape)} and begins with {raw[:4]!r}; legal: the {ID_BYTES} bytes of "
                                "nvshmem_get_unique_id() of rank 0, broadcast to all ranks")
    n, m = raw[4], raw[5]
    return raw[6:6 + n].decode(), raw[6 + n:6 + n + m].decode()


def world_of_id(uid: Any, rank: int, n_ranks: int) -> epx.World:
    """Collective. The token of the id takes the place of EPX_JOIN_TOKEN for the moment of the call."""
    address, token = read_id(uid)
    return _world_at(address, token, rank, n_ranks)


def _world_at(address: str, token: Optional[str], rank: int, n_ranks: int) -> epx.World:
    before = os.environ.get("EPX_JOIN_TOKEN")
    if token is not None:
        os.environ["EPX_JOIN_TOKEN"] = token
    try:
        return epx.World(f"tcp:{address}", rank=rank, n_ranks=n_ranks)
    finally:
        if before is None:
            os.environ.pop("EPX_JOIN_TOKEN", None)
        else:
            os.environ["EPX_JOIN_TOKEN"] = before


def world_of_launcher(rank: int, n_ranks: int) -> epx.World:
    """The default group of torch.distributed, or EPX_INIT_ADDR. Collective."""
    dist = distributed()
    if dist is not None:
        if (dist.get_rank(), dist.get_world_size()) != (rank, n_ranks):
            raise epx.ArgumentError(f"global_rank is {rank} of world_size {n_ranks}, torch.distributed has rank {dist.get_rank()} of "
                                    f"{dist.get_world_size()}; legal: the same, or nvshmem_init(uid, rank, world_size)")
        return world_over(dist.group.WORLD)
    address = os.environ.get("EPX_INIT_ADDR")
    if address:
        return _world_at(address, None, rank, n_ranks)
    if n_ranks == 1:
        return epx.World("self")
    raise epx.ArgumentError("nvshmem_init(global_rank, local_rank, world_size, device): torch.distributed is not initialised and "
                            "EPX_INIT_ADDR is not set; do one of the two, or call nvshmem_init(uid, rank, world_size)")


# ---- the world of nvshmem_init() ----


class Nvshmem:
    """What nvshmem_init() made: a world, its group, and the plans of nvshmem_alltoall()."""

    def __init__(self, world: epx.World, device: int):
        self.world, self.device = world, device
        self.rank, self.n_ranks = world.rank, world.n_ranks
        self.group: Any = world.group(device=device)
        self.plans: dict = {}
        self.barrier_block: Any = None

    def close(self) -> None:
        for plan, _ in self.plans.values():
            plan.close()
        self.plans.clear()
        if self.group is not None:
            self.group.close()
        self.world.close()


current: Optional[Nvshmem] = None


def device_index(device: Any) -> int:
    """-1 for the CPU, else the number of a CUDA device. None: the device of nvshmem_init(), or torch's current one, or the CPU."""
    torch = torch_module()
    if device is None:
        if current is not None:
            return current.device
        return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else -1
    if isinstance(device, int):
        return device
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind is None:
        kind, _, text = str(device).partition(":")
        index = int(text) if text.isdigit() else None
    if kind == "cpu":
        return -1
    if kind == "cuda":
        return index if index is not None else torch.cuda.current_device() if torch is not None else 0
    raise epx.ArgumentError(f"device is {device!r}; legal: cpu, cuda, cuda:N, N (a CUDA device) or -1 (the CPU)")


def find_world(group_name: Optional[str], rank: int, world_size: int) -> Tuple[epx.World, bool]:
    """The world of these ranks, and whether it is made for the caller. group_name None: that of nvshmem_init() first."""
    pg = registered_group(group_name) if group_name is not None else None
    tried = [] if group_name is None else [f'torch.distributed has no group registered as "{group_name}"' if distributed() is not None
                                           else "torch.distributed is not initialised"]
    if pg is not None:
        if (pg.rank(), pg.size()) != (rank, world_size):
            raise epx.ArgumentError(f'rank is {rank} of world_size {world_size}, and the group "{group_name}" has rank {pg.rank()} of {pg.size()}; '
                                    "legal: the same (both count the ranks of the group, which may be a part of the world)")
        return world_over(pg), True
    if current is not None and (current.rank, current.n_ranks) == (rank, world_size):
        return current.world, False
    tried.append("nvshmem_init() was not called" if current is None else
                 f"nvshmem_init() has rank {current.rank} of {current.n_ranks}")
    dist = distributed()
    if dist is not None and (dist.get_rank(), dist.get_world_size()) == (rank, world_size):
        return world_over(dist.group.WORLD), True
    if dist is not None:
        tried.append(f"the default group has rank {dist.get_rank()} of {dist.get_world_size()}")
    if world_size == 1:
        return epx.World("self"), True
    raise epx.ArgumentError(f"no group of rank {rank} of world_size {world_size} was found: {'; '.join(tried)}. Register a group "
                            "(torch._C._distributed_c10d._register_process_group(name, group)) or call nvshmem_init() first")
