"""World and Group: who the ranks are, and which of them exchange."""
import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Union

from . import _library
from ._errors import ArgumentError
from ._library import library
from ._plan import Plan, PlanConfig, int_table

AllGather = Callable[[bytes], Union[bytes, Sequence[bytes]]]
_FAILED = -203  # EPX_ERR_IO: what a callback that raised returns


class Handle:
    """A handle of libepx that is ended by close(), at the end of a with block, or not at all."""

    _handle: Optional[int] = None

    def handle(self) -> int:
        if self._handle is None:
            raise ArgumentError(f"this {type(self).__name__} is closed")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _timeout_ns(timeout_s: float) -> int:
    if timeout_s < 0:
        raise ArgumentError(f"timeout_s is {timeout_s}; legal: 0 (the default) or more")
    return int(timeout_s * 1e9)


class _Callbacks:
    """The caller's all-gather and barrier as C callbacks. An exception in one is kept and raised by the call that ran it."""

    def __init__(self, n_ranks: int, allgather: AllGather, barrier: Optional[Callable[[], None]]):
        self.n_ranks, self.error = n_ranks, None  # type: int, Optional[BaseException]
        self._gather, self._barrier = allgather, barrier or (lambda: allgather(b"") and None)
        self.c_gather, self.c_barrier = _library.ALLGATHER(self._c_gather), _library.BARRIER(self._c_barrier)

    def _c_gather(self, _ctx: Any, mine: int, n_bytes: int, out_all: int) -> int:
        try:
            blobs = self._gather(ctypes.string_at(mine, n_bytes))
            all_bytes = bytes(blobs) if isinstance(blobs, (bytes, bytearray, memoryview)) else b"".join(bytes(b) for b in blobs)
            if len(all_bytes) != n_bytes * self.n_ranks:
                raise ArgumentError(f"allgather gave {len(all_bytes)} bytes; legal: {n_bytes} of each of {self.n_ranks} ranks")
            ctypes.memmove(out_all, all_bytes, len(all_bytes))
            return 0
        except BaseException as e:  # must not cross C
            self.error = e
            return _FAILED

    def _c_barrier(self, _ctx: Any) -> int:
        try:
            self._barrier()
            return 0
        except BaseException as e:
            self.error = e
            return _FAILED

    def run(self, call: Callable[[], None]) -> None:
        self.error = None
        try:
            call()
        except Exception as e:
            if self.error is not None:
                raise e from self.error
            raise


class World(Handle):
    """This process (or thread) among its peers.

    bootstrap   "self" (one rank), "tcp:HOST:PORT" (with rank and n_ranks; EPX_JOIN_TOKEN is the shared secret), "env" (a launcher's
                variables), or None with `allgather`
    allgather   f(mine: bytes) -> the bytes of all ranks, joined or as a list, in rank order; at most 2 KiB a rank. Called only
                while worlds and groups are made
    barrier     f(); None: an all-gather of nothing
    transports  allowed ones, "shm,self"; None: all
    timeout_s   of set-up; 0: 30 s
    Collective over all ranks. Raises ArgumentError, UnsupportedError, MismatchError, TimeoutError, PeerError.
    """

    def __init__(self, bootstrap: Optional[str] = None, *, rank: int = -1, n_ranks: int = -1,
                 allgather: Optional[AllGather] = None, barrier: Optional[Callable[[], None]] = None,
                 transports: Optional[str] = None, timeout_s: float = 0):
        c = _library.WorldConfig()
        library().epx_world_config_init(byref(c))
        c.rank, c.n_ranks, c.timeout_ns = rank, n_ranks, _timeout_ns(timeout_s)
        c.bootstrap = None if bootstrap is None else bootstrap.encode()
        c.transports = None if transports is None else transports.encode()
        if allgather is not None and bootstrap is not None:
            raise ArgumentError(f'bootstrap is "{bootstrap}" and allgather is given; legal: one of the two')
        self._callbacks = None if allgather is None else _Callbacks(n_ranks, allgather, barrier)
        if self._callbacks is not None:
            c.allgather, c.barrier = self._callbacks.c_gather, self._callbacks.c_barrier
        out = c_void_p()
        self._run(lambda: library().epx_world_create(byref(c), byref(out)))
        self._handle = out.value

    def _run(self, call: Callable[[], None]) -> None:
        call() if self._callbacks is None else self._callbacks.run(call)

    @classmethod
    def local(cls, n_ranks: int) -> List["World"]:
        """The worlds of n_ranks threads of this process, rank i in place i: one thread makes them and hands each to its rank."""
        out = (c_void_p * max(n_ranks, 1))()
        library().epx_world_create_local(n_ranks, out)
        worlds = []
        for handle in out:
            w = cls.__new__(cls)
            w._callbacks, w._handle = None, handle
            worlds.append(w)
        return worlds

    @property
    def rank(self) -> int:
        return library().epx_world_rank(self.handle())

    @property
    def n_ranks(self) -> int:
        return library().epx_world_size(self.handle())

    def group(self, ranks: Optional[Sequence[int]] = None, device: int = -1) -> Optional["Group"]:
        """A group of these world ranks (None: all), group rank i being ranks[i]. Collective over the world; a rank that is not
        listed gets None. device: -1: CPU, else this rank's CUDA device (docs/api.md, "GPUs")."""
        table, n = (None, 0) if ranks is None else (int_table(ranks), len(ranks))
        out = c_void_p()
        self._run(lambda: library().epx_group_create(self.handle(), table, n, device, byref(out)))
        return None if out.value is None else Group(self, out.value, device)

    def close(self) -> None:
        """Close the groups first. Not collective; a second call does nothing."""
        if self._handle is not None:
            library().epx_world_destroy(self._handle)
            self._handle = None


@dataclass(frozen=True)
class GroupCaps:
    """What a group can do. links: "self", "mapped", "message"; token_dtypes: names that plans accept."""

    n_ranks: int
    rank: int
    transport: str
    links: List[str]
    max_top_k: int
    max_ranks: int
    token_dtypes: List[str]


def _bits(mask: int, names: Sequence[str]) -> List[str]:
    return [n for i, n in enumerate(names) if mask >> i & 1]


class Group(Handle):
    """Ranks that exchange. Made by World.group()."""

    def __init__(self, world: World, handle: int, device: int):
        self.world, self._handle, self.device = world, handle, device

    @property
    def rank(self) -> int:
        return library().epx_group_rank(self.handle())

    @property
    def n_ranks(self) -> int:
        return library().epx_group_size(self.handle())

    @property
    def caps(self) -> GroupCaps:
        c = _library.GroupCaps(size=ctypes.sizeof(_library.GroupCaps))
        library().epx_group_caps(self.handle(), byref(c))
        return GroupCaps(c.n_ranks, c.rank, c.transport.decode(), _bits(c.links, ("self", "mapped", "message")), c.max_top_k,
                         c.max_ranks, _bits(c.token_dtypes, ("f32", "bf16", "f16", "fp8_e4m3")))

    def allgather(self, mine: bytes, timeout_s: float = 0) -> List[bytes]:
        """One record of at most 256 bytes from each rank, the same length on all, in rank order. Collective. timeout_s 0: wait for
        ever, but a dead peer ends it. TimeoutError, PeerError, AbortedError, MismatchError: the group is lost."""
        n = len(mine)
        out = ctypes.create_string_buffer(max(n * self.n_ranks, 1))
        library().epx_group_allgather(self.handle(), mine, n, out, _timeout_ns(timeout_s))
        return [out.raw[i * n:(i + 1) * n] for i in range(self.n_ranks)]

    def barrier(self, timeout_s: float = 0) -> None:
        """Wait until all ranks are here; see allgather()."""
        self.allgather(b"", timeout_s)

    def mask(self, rank: int, alive: bool = False) -> None:
        """Mark another rank as dead, or take that back; then Plan.recover()."""
        library().epx_group_mask(self.handle(), rank, int(alive))

    @property
    def dead_rank(self) -> Optional[int]:
        """The peer that was found dead, or None. Never blocks."""
        rank = library().epx_group_dead_rank(self.handle())
        return None if rank < 0 else rank

    def plan(self, config: Optional[PlanConfig] = None, **fields: Any) -> Plan:
        """An exchange of this shape: group.plan(max_tokens=..., hidden=..., top_k=..., n_experts=..., ...); PlanConfig lists the
        fields. Collective. ArgumentError and UnsupportedError name field, value and legal values; MismatchError, CapacityError,
        OutOfMemoryError, TimeoutError, PeerError."""
        return Plan(self, config if config is not None else PlanConfig(**fields))

    def plan_bytes(self, config: Optional[PlanConfig] = None, **fields: Any) -> int:
        """Bytes that such a plan takes on each rank, device memory included."""
        c, keep = (config if config is not None else PlanConfig(**fields)).to_c()
        out = c_size_t()
        library().epx_group_plan_bytes(self.handle(), byref(c), byref(out))
        del keep
        return out.value

    def close(self) -> None:
        """Close the plans first. Not collective; a second call does nothing."""
        if self._handle is not None:
            library().epx_group_destroy(self._handle)
            self._handle = None


def plan_bytes(n_ranks: int, config: Optional[PlanConfig] = None, *, n_here: Optional[int] = None, **fields: Any) -> int:
    """Bytes that a plan of this shape takes on a rank of n_ranks, on CPUs. n_here: ranks on its host; None: all."""
    c, keep = (config if config is not None else PlanConfig(**fields)).to_c()
    out = c_size_t()
    if n_here is None:
        library().epx_plan_bytes(byref(c), n_ranks, byref(out))
    else:
        library().epx_plan_bytes_hosts(byref(c), n_ranks, n_here, byref(out))
    del keep
    return out.value
