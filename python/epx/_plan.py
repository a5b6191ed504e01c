"""Plan: one exchange shape, and its dispatch and combine."""
import ctypes
import sys
from ctypes import byref, c_int, c_int32, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from . import _library
from ._arrays import DTYPES, FLOAT32, INT32, WORDS, Array, View, checked
from ._errors import ArgumentError
from ._library import library

if TYPE_CHECKING:
    from ._world import Group

_ENUMS: Dict[str, Dict[str, int]] = {
    "dtype": {name: number for name, (number, _, _) in DTYPES.items()},
    "layout": {"lists": 0, "expert_major": 1, "contiguous": 2},
    "combine": {"exact": 0, "prereduced": 1, "partial": 1},
    "scale_format": {"f32": 0, "ue8m0": 1},
    "scale_layout": {"row_major": 0, "col_major": 1},
}
_NAMES = {number: name for name, number in _ENUMS["dtype"].items()}


def _number(field_name: str, kind: str, value: str) -> int:
    names = _ENUMS[kind]
    if value not in names:
        raise ArgumentError(f'{field_name} is "{value}"; legal: {", ".join(names)}')
    return names[value]


def int_table(values: Optional[Sequence[int]]) -> Any:
    return None if values is None else (c_int * len(values))(*[int(v) for v in values])


@dataclass(frozen=True)
class PlanConfig:
    """The fields of epx_plan_config_t, with its defaults. dtypes: "f32", "bf16", "f16", "fp8_e4m3"; None: as the library derives it.

    layout          "lists", "expert_major", "contiguous"
    combine         "exact", "prereduced"
    expert_dtype    None: combine_dtype; combine_dtype None: token_dtype; wire_dtype None: token_dtype
    scale_format    "f32", "ue8m0"; scale_layout "row_major", "col_major"
    timeout_s       of every wait; 0: 10 s
    """

    max_tokens: int
    hidden: int
    top_k: int
    n_experts: int
    n_slots: int = 0
    slot_rank: Optional[Sequence[int]] = None
    slot_expert: Optional[Sequence[int]] = None
    placement_version: int = 0
    token_dtype: str = "f32"
    wire_dtype: Optional[str] = None
    expert_dtype: Optional[str] = None
    combine_dtype: Optional[str] = None
    scale_block: int = 128
    scale_format: str = "f32"
    scale_layout: str = "row_major"
    layout: str = "lists"
    align: int = 1
    combine: str = "exact"
    replicate: int = 1
    n_channels: int = 1
    n_blocks: int = 0
    renormalize: bool = False
    backend: Optional[str] = None
    timeout_s: float = 0
    debug: bool = False

    def _check_table(self, name: str) -> None:
        table = getattr(self, name)
        n = self.n_slots or self.n_experts
        if table is not None and len(table) != n:
            raise ArgumentError(f"{name} has {len(table)} entries; legal: one for each of {n} slots")

    def to_c(self) -> Tuple[_library.PlanConfig, Any]:
        """The struct, and what must live as long."""
        c = _library.PlanConfig()
        library().epx_plan_config_init(byref(c))
        for name in ("max_tokens", "hidden", "top_k", "n_experts", "n_slots", "placement_version", "scale_block", "align",
                     "replicate", "n_channels", "n_blocks"):
            setattr(c, name, int(getattr(self, name)))
        for name, default in (("token_dtype", "f32"), ("wire_dtype", self.token_dtype), ("expert_dtype", "bytes"),
                              ("combine_dtype", "bytes")):
            setattr(c, name, _number(name, "dtype", getattr(self, name) or default))
        for name in ("scale_format", "scale_layout", "layout", "combine"):
            setattr(c, name, _number(name, name, getattr(self, name)))
        self._check_table("slot_rank")
        self._check_table("slot_expert")
        tables = int_table(self.slot_rank), int_table(self.slot_expert)
        c.slot_rank, c.slot_expert = tables
        c.renormalize, c.debug, c.timeout_ns = int(self.renormalize), int(self.debug), int(self.timeout_s * 1e9)
        c.backend = None if self.backend is None else self.backend.encode()
        return c, tables


@dataclass(frozen=True)
class PlanInfo:
    """epx_plan_info_t. row_cap: rows an expert with expert_major; max_rows: rows that outputs can have in the plan's layout."""

    backend: str
    transport: str
    layout: str
    n_local_experts: int
    placement_version: int
    row_cap: int
    max_rows: int
    scale_words: int
    scale_gap: int
    slab_bytes: int
    private_bytes: int
    epoch: int
    backend_why: str


@dataclass(frozen=True)
class PlanStats:
    """epx_plan_stats_t: counters since create. rows_sent, rows_received: one for each rank."""

    n_dispatches: int
    n_combines: int
    rows_sent: List[int]
    rows_received: List[int]
    dispatch_bytes: int
    combine_bytes: int
    wait_s: float


class Lists:
    """Where the rows of the local experts lie (layout "lists"), valid until combine_send of the channel.

    expert_off  [El + 1]: expert e owns entries expert_off[e] .. expert_off[e + 1]
    entries     [n_rows, 2]: source rank and token. Order: expert, source rank, token
    n_rows      -1 on a GPU, where all arrays are device memory
    """

    def __init__(self, plan: "Plan", raw: _library.Lists):
        self._plan, self._raw = plan, raw
        self.n_local_experts, self.n_rows = raw.n_local_experts, raw.n_rows
        device = plan.group.device
        rows = raw.n_rows if raw.n_rows >= 0 else plan.info.max_rows
        self.expert_off = Array(raw.expert_off, (raw.n_local_experts + 1,), "i32", device, plan)
        self.entries = Array(raw.entries, (rows, 2), "u32", device, plan)

    def _host(self) -> None:
        if self._plan.group.device >= 0:
            raise ArgumentError("rows of a list can be asked for one by one on the CPU only; on a GPU read row_base there")

    def entry(self, i: int) -> Tuple[int, int]:
        """(source rank, token) of entry i; CPU only."""
        self._host()
        if not 0 <= i < self.n_rows:
            raise IndexError(f"entry {i}; legal: 0 to {self.n_rows - 1}")
        e = _library.ListEntry.from_address(self._raw.entries + 8 * i)
        return e.src, e.token

    def row(self, i: int) -> Array:
        """Row of entry i, [H], where it lies (maybe another rank's memory: read only); CPU only."""
        src, token = self.entry(i)
        base = c_void_p.from_address(self._raw.row_base + 8 * src).value or 0
        return Array(base + token * self._raw.row_stride_bytes, (self._plan.config.hidden,), self._plan.wire_dtype, -1, self)

    def scales(self, i: int) -> Array:
        """Scales of entry i, [scale_words]; fp8 wire, CPU only."""
        src, token = self.entry(i)
        if not self._raw.scale_base:
            raise ArgumentError(f"the wire dtype is {self._plan.wire_dtype}: rows have no scales")
        base = c_void_p.from_address(self._raw.scale_base + 8 * src).value or 0
        words = "u32" if self._plan.config.scale_format == "ue8m0" else "f32"
        return Array(base + token * self._raw.scale_stride * 4, (self._plan.info.scale_words,), words, -1, self)


def stream_pointer(stream: Any) -> Optional[int]:
    """The cudaStream_t of an int, of a stream of torch or cupy, or of an object with __cuda_stream__."""
    if stream is None or isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise ArgumentError(f"stream is a {type(stream).__name__}; legal: None, an int, a stream of torch or cupy, or an object with "
                        "__cuda_stream__")


class Plan:
    """An exchange of one shape, made by Group.plan(). dispatch() and combine(), or their halves, in turn; every rank makes every
    call, also without tokens.

    Arrays are on the CPU for groups on the CPU, on the group's CUDA device otherwise; contiguous, in C order. On a GPU work is put on
    `stream` (None: torch's current stream if torch is loaded, else the default stream), and arrays must live until it is done.
    Errors: ArgumentError, CapacityError, StateError: nothing has changed, call again. TimeoutError, PeerError, AbortedError: the
    plan is aborted on all ranks; see recover().
    """

    def __init__(self, group: "Group", config: PlanConfig):
        self._handle: Optional[int] = None
        self.group, self.config = group, config
        c, keep = config.to_c()
        out = c_void_p()
        library().epx_plan_create(group.handle(), byref(c), byref(out))
        del keep
        self._handle = out.value
        self._held: Dict[Tuple[int, str], Any] = {}  # GPU: arrays that kernels may still use
        self._n_sent: Dict[int, int] = {}  # tokens of the exchange in flight on each channel
        self._info: Optional[PlanInfo] = None
        self._resolve()

    def _resolve(self) -> None:
        c = self.config
        self.wire_dtype = c.wire_dtype or c.token_dtype
        back = c.combine_dtype or c.token_dtype
        self.expert_dtype = c.expert_dtype or (c.token_dtype if back == "fp8_e4m3" else back)
        self.result_dtype = c.token_dtype
        if c.token_dtype == "fp8_e4m3":
            self.result_dtype = back if back != "fp8_e4m3" else self.expert_dtype

    def handle(self) -> int:
        if self._handle is None:
            raise ArgumentError("this Plan is closed")
        return self._handle

    # ---- what the plan is ----

    @property
    def info(self) -> PlanInfo:
        c = _library.PlanInfo(size=ctypes.sizeof(_library.PlanInfo))
        library().epx_plan_info(self.handle(), byref(c))
        layout = ("lists", "expert_major", "contiguous")[c.layout]
        return PlanInfo(c.backend.decode(), c.transport.decode(), layout, c.n_local_experts, c.placement_version, c.row_cap, c.max_rows,
                        c.scale_words, c.scale_gap, c.slab_bytes, c.private_bytes, c.epoch, c.backend_why.decode())

    def shape_info(self) -> PlanInfo:
        """info, asked once: for shapes, which change only with the placement."""
        if self._info is None:
            self._info = self.info
        return self._info

    @property
    def stats(self) -> PlanStats:
        n = self.group.n_ranks
        sent, received = (c_uint64 * n)(), (c_uint64 * n)()
        c = _library.PlanStats(size=ctypes.sizeof(_library.PlanStats), rows_sent=sent, rows_received=received)
        library().epx_plan_stats(self.handle(), byref(c))
        return PlanStats(c.n_dispatches, c.n_combines, list(sent), list(received), c.dispatch_bytes, c.combine_bytes,
                         c.wait_ns * 1e-9)

    def input(self, channel: int = 0) -> Array:
        """Rows [max_tokens, H] inside the plan: given as x, dispatch copies nothing where memory is mapped. They must stay untouched
        until combine_recv of the channel."""
        out = c_void_p()
        library().epx_plan_input(self.handle(), channel, byref(out))
        return Array(out.value or 0, (self.config.max_tokens, self.config.hidden), self.config.token_dtype, self.group.device, self)

    def lists(self, channel: int = 0) -> Lists:
        """After dispatch_recv, layout "lists"; else StateError."""
        raw = _library.Lists()
        library().epx_plan_lists(self.handle(), channel, byref(raw))
        return Lists(self, raw)

    def offsets(self, channel: int = 0) -> List[int]:
        """First row of each local expert in dispatch output, and the number of rows: El + 1 numbers. After dispatch_recv."""
        out = c_void_p()
        library().epx_plan_offsets(self.handle(), channel, byref(out))
        n = self.info.n_local_experts + 1
        return list((c_int32 * n).from_address(out.value or 0))

    # ---- the step ----

    def _io(self, channel: int, stream: Any) -> _library.Io:
        io = _library.Io()
        library().epx_io_init(byref(io))
        io.channel = channel
        if self.group.device < 0:
            if stream is not None:
                raise ArgumentError("stream is given with a group on the CPU; legal: None")
            return io
        if stream is None and "torch" in sys.modules:
            stream = sys.modules["torch"].cuda.current_stream(self.group.device)
        io.stream = stream_pointer(stream)
        return io

    def _put(self, io: _library.Io, name: str, obj: Any, dtypes: Tuple[str, ...], shape: Sequence[Optional[int]],
             at_least: bool = False, called: str = "") -> Optional[View]:
        """Set a pointer of io; `called`: the argument's name where it is another."""
        if obj is None:
            return None
        v = checked(obj, called or name, dtypes, self.group.device, shape, at_least)
        setattr(io, name, v.ptr or None)
        return v

    def _need(self, name: str, obj: Any) -> Any:
        if obj is None:
            raise ArgumentError(f"{name} is None; it is needed here")
        return obj

    def _put_dispatch_send(self, io: _library.Io, x: Any, ids: Any, weights: Any, x_scale: Any, n_tokens: Optional[int],
                           n_tokens_device: Any) -> List[Any]:
        c = self.config
        rows = self._put(io, "x", self._need("x", x), DTYPES[c.token_dtype][2], (None, c.hidden))
        t = rows.shape[0] if rows is not None else 0
        if n_tokens is not None and not 0 <= n_tokens <= t:
            raise ArgumentError(f"n_tokens is {n_tokens}; legal: 0 to the {t} rows of x")
        io.n_tokens = t if n_tokens is None else n_tokens
        held = [rows, self._put(io, "ids", self._need("ids", ids), INT32, (t, c.top_k)),
                self._put(io, "weights", self._need("weights", weights), FLOAT32, (t, c.top_k))]
        words = self.shape_info().scale_words if x_scale is not None else 0
        held.append(self._put(io, "x_scale", x_scale, WORDS, (t, words)))
        held.append(self._put(io, "n_tokens_device", n_tokens_device, INT32, (1,)))
        return held

    def _output_shape(self) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
        """Of out_x and out_scale."""
        i, c = self.shape_info(), self.config
        lead: Tuple[int, ...] = (i.n_local_experts, i.row_cap) if c.layout == "expert_major" else (i.max_rows,)
        if c.scale_layout == "row_major":
            return lead + (c.hidden,), lead + (i.scale_words,)
        return lead + (c.hidden,), lead[:-1] + (i.scale_words, i.scale_gap)

    def _put_dispatch_recv(self, io: _library.Io, out_x: Any, out_scale: Any, out_counts: Any, out_histogram: Any) -> List[Any]:
        rows, scales = self._output_shape()
        n = self.shape_info().n_local_experts
        return [self._put(io, "out_x", out_x, DTYPES[self.wire_dtype][2], rows), self._put(io, "out_scale", out_scale, WORDS, scales),
                self._put(io, "out_counts", out_counts, INT32, (n,)),
                self._put(io, "out_histogram", out_histogram, INT32, (self.config.n_experts,))]

    def _put_combine_send(self, io: _library.Io, y: Any, channel: int) -> List[Any]:
        i, c = self.shape_info(), self.config
        shape: Tuple[Optional[int], ...] = (None, c.hidden)
        if c.layout == "expert_major":
            shape = (i.n_local_experts, i.row_cap, c.hidden)
        elif self.group.device < 0:  # the library reads as many rows as dispatch gave
            shape = (self.offsets(channel)[-1], c.hidden)
        return [self._put(io, "x", self._need("y", y), DTYPES[self.expert_dtype][2], shape, c.layout != "expert_major", "y")]

    def _put_combine_recv(self, io: _library.Io, out: Any, add: Any, combine_weights: Any, n_tokens: int) -> List[Any]:
        h = self.config.hidden
        names = DTYPES[self.result_dtype][2]
        return [self._put(io, "out_x", self._need("out", out), names, (n_tokens, h), True, "out"),
                self._put(io, "add", add, names, (n_tokens, h), True),
                self._put(io, "combine_weights", combine_weights, FLOAT32, (n_tokens, self.config.top_k), True)]

    def _call(self, name: str, io: _library.Io, channel: int, held: Any) -> None:
        getattr(library(), name)(self.handle(), byref(io))
        if self.group.device >= 0:  # on the CPU the call is done with them
            self._held[channel, name] = held

    def _sent(self, channel: int) -> int:
        return self._n_sent.get(channel, 0)

    def dispatch_send(self, x: Any, ids: Any, weights: Any, *, x_scale: Any = None, n_tokens: Optional[int] = None,
                      n_tokens_device: Any = None, channel: int = 0, stream: Any = None) -> None:
        """Send each token to the ranks that own its experts.

        x        [T, H] token dtype
        ids      [T, K] int32 or uint32, logical experts; -1: not sent
        weights  [T, K] float32
        x_scale  [T, scale_words], fp8 tokens only
        n_tokens, n_tokens_device  the first n rows only; the second, [1] uint32 on the GPU, overrides
        """
        io = self._io(channel, stream)
        held = self._put_dispatch_send(io, x, ids, weights, x_scale, n_tokens, n_tokens_device)
        self._call("epx_dispatch_send", io, channel, held)
        self._n_sent[channel] = io.n_tokens

    def dispatch_recv(self, *, out_x: Any = None, out_scale: Any = None, out_counts: Any = None, out_histogram: Any = None,
                      channel: int = 0, stream: Any = None) -> None:
        """Receive the rows of the local experts; with layout "lists" see lists().

        out_x          expert_major [El, row_cap, H], contiguous [max_rows, H] wire dtype
        out_scale      fp8 wire: [.., scale_words], or [.., scale_words, scale_gap] with col_major
        out_counts     [El] int32; out_histogram [E] int32
        """
        io = self._io(channel, stream)
        self._call("epx_dispatch_recv", io, channel, self._put_dispatch_recv(io, out_x, out_scale, out_counts, out_histogram))

    def dispatch(self, x: Any, ids: Any, weights: Any, *, x_scale: Any = None, n_tokens: Optional[int] = None,
                 n_tokens_device: Any = None, out_x: Any = None, out_scale: Any = None, out_counts: Any = None,
                 out_histogram: Any = None, channel: int = 0, stream: Any = None) -> None:
        """dispatch_send() and dispatch_recv() in one call; all arguments are checked before anything is sent."""
        io = self._io(channel, stream)
        recv = self._put_dispatch_recv(io, out_x, out_scale, out_counts, out_histogram)
        held = self._put_dispatch_send(io, x, ids, weights, x_scale, n_tokens, n_tokens_device)
        self._call("epx_dispatch", io, channel, held + recv)
        self._n_sent[channel] = io.n_tokens

    def combine_send(self, y: Any, *, channel: int = 0, stream: Any = None) -> None:
        """Send the experts' outputs back: y as dispatch gave the rows, in expert dtype ("lists": [n_rows, H] in list order)."""
        io = self._io(channel, stream)
        self._call("epx_combine_send", io, channel, self._put_combine_send(io, y, channel))

    def combine_recv(self, out: Any, *, add: Any = None, combine_weights: Any = None, channel: int = 0, stream: Any = None) -> None:
        """Receive the weighted sums.

        out              [T or more, H] result dtype: the token dtype, or with fp8 tokens the combine dtype
        add              [T, H], added before the rounding
        combine_weights  [T, K] float32 in place of those of dispatch; "exact" only
        """
        io = self._io(channel, stream)
        held = self._put_combine_recv(io, out, add, combine_weights, self._sent(channel))
        self._call("epx_combine_recv", io, channel, held)

    def combine(self, y: Any, out: Any, *, add: Any = None, combine_weights: Any = None, channel: int = 0,
                stream: Any = None) -> None:
        """combine_send() and combine_recv() in one call."""
        io = self._io(channel, stream)
        held = self._put_combine_recv(io, out, add, combine_weights, self._sent(channel)) + self._put_combine_send(io, y, channel)
        self._call("epx_combine", io, channel, held)

    # ---- failures and placement ----

    def poll(self) -> None:
        """Raise the plan's first error, found here, at a peer or on the GPU. Never blocks; any thread."""
        library().epx_plan_poll(self.handle())

    def abort(self) -> None:
        """Make pending and later calls fail with AbortedError on all ranks that can be reached. Any thread."""
        library().epx_plan_abort(self.handle())

    def recover(self) -> None:
        """Make an aborted plan usable again, without the ranks that Group.mask() marks. Collective over the living."""
        library().epx_plan_recover(self.handle())
        self._held.clear()

    def missing(self, channel: int = 0) -> Tuple[int, List[int]]:
        """After masking: how many tokens miss places, and how many places each token of this rank misses."""
        n, places = c_int(), ctypes.POINTER(c_uint8)()
        library().epx_plan_missing(self.handle(), channel, byref(n), byref(places))
        return n.value, [places[i] for i in range(self._sent(channel))] if places and n.value else [0] * self._sent(channel)

    def set_placement(self, slot_rank: Optional[Sequence[int]], slot_expert: Optional[Sequence[int]], version: int,
                      epoch: int) -> None:
        """New tables [n_slots] for exchanges from `epoch` on. Collective."""
        n = self.config.n_slots or self.config.n_experts
        for name, table in (("slot_rank", slot_rank), ("slot_expert", slot_expert)):
            if table is not None and len(table) != n:
                raise ArgumentError(f"{name} has {len(table)} entries; legal: one for each of {n} slots")
        library().epx_plan_set_placement(self.handle(), int_table(slot_rank), int_table(slot_expert), version, epoch)
        self._info = None

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """Collective unless aborted or a peer died: waits, at most timeout_s, until no peer uses the memory. A second call does
        nothing."""
        if self._handle is not None:
            library().epx_plan_destroy(self._handle)
            self._handle = None
            self._held.clear()

    def __enter__(self) -> "Plan":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
