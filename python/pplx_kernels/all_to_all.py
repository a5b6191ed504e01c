"""AllToAll: pplx_kernels' exchange, by one plan of libepx."""
import os
import threading
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import epx
from epx import ArgumentError
from epx._arrays import View, view

from . import _bootstrap, _torch_ops
from ._tensors import FLOATS, copy, copy_rows, full, is_tensor, keep_for_stream, look, prefix, row_major, scalar, torch_module

_ONE_BYTE = ("float8_e4m3fn", "float8_e4m3", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "uint8", "int8")
_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_DEFAULT_TIMEOUT_S = 60.0
_WATCH_S = 0.5


@dataclass(frozen=True)
class _Shape:
    """The arguments of intranode() and internode()."""

    max_num_tokens: int
    num_experts: int
    experts_per_token: int
    rank: int
    world_size: int
    dp_size: int
    hidden_dim: int
    hidden_dim_bytes: int
    hidden_dim_scale_bytes: int

    @property
    def itemsize(self) -> int:
        return self.hidden_dim_bytes // self.hidden_dim

    @property
    def n_scales(self) -> int:
        return self.hidden_dim_scale_bytes // 4

    def check(self) -> None:
        for name in ("max_num_tokens", "num_experts", "experts_per_token", "world_size", "dp_size", "hidden_dim"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}; legal: 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ArgumentError(f"rank is {self.rank}; legal: 0 to world_size - 1 = {self.world_size - 1}")
        if self.world_size % self.dp_size:
            raise ArgumentError(f"dp_size is {self.dp_size} with world_size {self.world_size}; legal: a divisor (ranks that hold the same tokens)")
        if self.itemsize not in (1, 2, 4) or self.hidden_dim_bytes - self.itemsize * self.hidden_dim >= 16:
            raise ArgumentError(f"hidden_dim_bytes is {self.hidden_dim_bytes} with hidden_dim {self.hidden_dim}; legal: 1, 2 or 4 bytes a "
                                "channel, rounded up to 16 at most")
        if self.hidden_dim_scale_bytes < 0 or self.hidden_dim_scale_bytes % 4:
            raise ArgumentError(f"hidden_dim_scale_bytes is {self.hidden_dim_scale_bytes}; legal: 0, or 4 bytes for each float32 scale of a row")
        if self.hidden_dim_scale_bytes and self.itemsize != 1:
            raise ArgumentError(f"hidden_dim_scale_bytes is {self.hidden_dim_scale_bytes} with {self.itemsize} bytes a channel; legal: 0 (scales "
                                "go with one byte a channel)")

    @property
    def scale_block(self) -> int:
        """Channels a scale, so that a row has at least n_scales: 128 where that is enough."""
        n = max(self.n_scales, 1)
        return 128 if -(-self.hidden_dim // 128) >= n else max(self.hidden_dim // n, 1)


def _plan_dtypes(itemsize: int, expert: str, out: str) -> Tuple[str, str, str]:
    """Token, expert and combine dtype of a plan: rows travel back as the experts gave them, or in f32, and are rounded once."""
    if itemsize == 2 and out == "f32":
        raise ArgumentError("out_tokens or out_dtype is float32 with 2 bytes a channel; legal: bfloat16, float16")
    token = {1: "fp8_e4m3", 2: out, 4: "f32"}[itemsize]
    result = out if token == "fp8_e4m3" else token
    return token, expert, expert if expert == result else "f32"


def _float_name(value: Any, field: str) -> Optional[str]:
    """f32, bf16 or f16 for a dtype of torch or numpy, or its name."""
    if value is None:
        return None
    name = getattr(value, "__name__", None) or str(getattr(value, "name", value)).split(".")[-1]
    name = FLOATS.get(name, name)
    if name not in _NAMES:
        raise ArgumentError(f"{field} is {value}; legal: float32, bfloat16, float16")
    return name


def _refuse_capture(what: str) -> None:
    torch = torch_module()
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise epx.StateError(f"{what} inside a graph capture; do it once before the capture")


def _watch(plan: epx.Plan, stop: threading.Event) -> None:
    """Ask now and then whether a peer has died: that ends the waits of kernels, also while the host waits for the stream. The error
    stays with the plan and is raised by its next call."""
    while not stop.wait(_WATCH_S):
        try:
            plan.poll()
        except epx.Error:
            return


class AllToAll:
    """Dispatch and combine with the shapes, dtypes and order of pplx_kernels' AllToAll. Made by intranode() or internode(); every rank makes
    every call, also without tokens. One exchange is in flight.

    Letters: T max_num_tokens, G = world_size / dp_size DP groups, El experts of this rank, H hidden_dim, K experts_per_token.
    """

    def __init__(self, shape: _Shape, group_name: Optional[str], device: Any, expert_dtype: Any, out_dtype: Any,
                 timeout_s: Optional[float]):
        shape.check()
        _refuse_capture("an AllToAll is made")
        self._shape, self._device = shape, _bootstrap.device_index(device)
        self._timeout_s = float(os.environ.get("EPX_TIMEOUT_S", _DEFAULT_TIMEOUT_S)) if timeout_s is None else timeout_s
        expert, out = _float_name(expert_dtype, "expert_dtype"), _float_name(out_dtype, "out_dtype")
        self._fixed = expert is not None or out is not None
        default = "f32" if shape.itemsize == 4 else "bf16"
        self._tensors = torch_module() is not None  # kind of the buffers made here, until a call says otherwise
        self._plan: Any = None
        self._group: Any = None
        self._buffers: dict = {}
        self._watcher: Optional[threading.Thread] = None
        self._m, self._n = 0, 0  # rows of dp_x of the exchange in flight, and tokens (CPU)
        self._world, self._own_world = _bootstrap.find_world(group_name, shape.rank, shape.world_size)
        try:
            self._group = self._world.group(device=self._device)
            self._make_plan(expert or out or default, out or default)
        except BaseException:
            self.destroy()
            raise
        if self._tensors:
            self._ones()  # outside of any graph capture
        self._handle = _torch_ops.register(self)
        self._ops = _torch_ops.operators()
        self._tensor_type = torch_module().Tensor if self._ops is not None else ()

    @classmethod
    def intranode(cls, max_num_tokens: int, num_experts: int, experts_per_token: int, rank: int, world_size: int, dp_size: int,
                  hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int, group_name: str = "default", *,
                  device: Any = None, expert_dtype: Any = None, out_dtype: Any = None,
                  timeout_s: Optional[float] = None) -> "AllToAll":
        """Between the ranks of one host. Collective.

        dp_size      ranks that hold the same tokens (SGLang's attention-TP size, not its --dp)
        group_name   of a group that c10d knows; its ranks count, it may be a part of the world. Otherwise the ranks of nvshmem_init()
        More than pplx_kernels has:
        device       None: that of nvshmem_init(), or torch's current CUDA device, or the CPU
        expert_dtype, out_dtype   of expert_y and out_tokens. None: bfloat16 (float32 with 4 bytes a channel), and the first combine with
                     others makes a new plan, collectively
        timeout_s    of every wait; None: EPX_TIMEOUT_S of the environment, or 60
        Raises epx.ArgumentError, UnsupportedError (named by the library), MismatchError, OutOfMemoryError.
        """
        shape = _Shape(max_num_tokens, num_experts, experts_per_token, rank, world_size, dp_size, hidden_dim, hidden_dim_bytes,
                       hidden_dim_scale_bytes)
        return cls(shape, group_name, device, expert_dtype, out_dtype, timeout_s)

    @classmethod
    def internode(cls, max_num_tokens: int, num_experts: int, experts_per_token: int, rank: int, world_size: int, dp_size: int,
                  hidden_dim: int, hidden_dim_bytes: int, hidden_dim_scale_bytes: int, *, device: Any = None,
                  expert_dtype: Any = None, out_dtype: Any = None, timeout_s: Optional[float] = None) -> "AllToAll":
        """The same between ranks of any hosts that libepx can join: those of nvshmem_init(), or of torch.distributed's default group."""
        shape = _Shape(max_num_tokens, num_experts, experts_per_token, rank, world_size, dp_size, hidden_dim, hidden_dim_bytes,
                       hidden_dim_scale_bytes)
        return cls(shape, None, device, expert_dtype, out_dtype, timeout_s)

    # ---- the plan ----

    def _make_plan(self, expert: str, out: str) -> None:
        s = self._shape
        token, expert, back = _plan_dtypes(s.itemsize, expert, out)
        self._plan = self._group.plan(max_tokens=s.max_num_tokens, hidden=s.hidden_dim, top_k=s.experts_per_token,
                                      n_experts=s.num_experts, token_dtype=token, expert_dtype=expert, combine_dtype=back,
                                      scale_block=s.scale_block, layout="expert_major", replicate=s.dp_size,
                                      timeout_s=self._timeout_s)
        self._dtypes = (expert, out)
        self._info = self._plan.info
        if self._device >= 0:
            self._stop = threading.Event()
            self._watcher = threading.Thread(target=_watch, args=(self._plan, self._stop), name="epx-watch", daemon=True)
            self._watcher.start()

    def _stop_watch(self) -> None:
        if self._watcher is not None:
            self._stop.set()
            self._watcher.join()
            self._watcher = None

    @property
    def plan(self) -> epx.Plan:
        """The plan of libepx behind this object."""
        if self._plan is None:
            raise epx.StateError("this AllToAll is destroyed")
        return self._plan

    @property
    def num_local_experts(self) -> int:
        return self._info.n_local_experts

    @property
    def rows_per_expert(self) -> int:
        """T * G: second extent of out_expert_x and expert_y."""
        return self._info.row_cap

    def _buffer(self, name: str, shape: Tuple[int, ...], dtype: str, value: float) -> Any:
        """A buffer of this object: made once, outside of graphs."""
        key = (name, shape, dtype, self._tensors)
        if key not in self._buffers:
            self._buffers[key] = full(self._tensors, self._device, shape, dtype, value)
        return self._buffers[key]

    def _ones(self) -> View:
        """[T, K] weights for dispatch, which are not used: those of combine take their place."""
        return view(self._buffer("ones", (self._shape.max_num_tokens, self._shape.experts_per_token), "float32", 1.0), "weights")

    def _count(self, bound_m: Any, m: int) -> int:
        """Tokens of this call as the host knows them; on a GPU bound_m is read by the device."""
        if bound_m is None or self._device >= 0:
            return m
        n = scalar(bound_m)
        if n > m:
            raise ArgumentError(f"bound_m is {n}; legal: 0 to the {m} rows of dp_x")
        return n

    def _common(self, bound_m: Any, rows: int, field: str) -> Any:
        """The epx_io_t of a call, with the number of tokens."""
        if rows > self._shape.max_num_tokens:
            raise epx.CapacityError(f"{field} has {rows} rows; legal: 0 to max_num_tokens = {self._shape.max_num_tokens}")
        io = self.plan._io(0, None)
        io.n_tokens = self._count(bound_m, rows)
        if bound_m is not None and self._device >= 0 and rows > 0:  # without rows there is nothing to bound
            io.n_tokens_device = look(bound_m, "bound_m", ("uint32", "int32"), self._device, (1,)).ptr
        return io

    # ---- dispatch ----

    def dispatch(self, out_expert_num_tokens: Any, out_expert_x: Any, out_expert_x_scale: Any, dp_x: Any, dp_x_scale: Any,
                 indices: Any, bound_m: Any, do_send: bool = True, do_recv: bool = True) -> None:
        """Send each token to the ranks of its experts, and receive the rows of the own experts.

        out_expert_num_tokens [El] int32        rows of each own expert
        out_expert_x [El, T * G, H]             dtype of dp_x; rows past the count are not written. Order: source rank, token
        out_expert_x_scale [El, T * G, hs] float32, any strides, or None
        dp_x [m, H], dp_x_scale [m, hs] float32, any strides, or None; m <= T
        indices [m, K] uint32 (or int32)        ids of num_experts and above on a GPU, and 2^32 - 1 anywhere, mean: not sent
        bound_m [1] uint32 or None              the first bound_m rows only; read by the device on a GPU, so that a graph may change it
        """
        if self._ops is not None and isinstance(dp_x, self._tensor_type):
            self._ops.all_to_all_dispatch(self._handle, out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices,
                                          bound_m, do_send, do_recv)
        else:
            self.run_dispatch(out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m, do_send, do_recv)

    def run_dispatch(self, counts: Any, out_x: Any, out_scale: Any, x: Any, x_scale: Any, indices: Any, bound_m: Any, do_send: bool,
                     do_recv: bool) -> None:
        """dispatch() itself, without the operator."""
        s, i = self._shape, self._info
        self._tensors = is_tensor(x)
        rows = self._row_view(x, "dp_x", (None, s.hidden_dim))
        io = self._common(bound_m, rows.shape[0], "dp_x")
        if do_send:
            io.x = rows.ptr or None
            io.ids = look(indices, "indices", ("uint32", "int32"), self._device, (rows.shape[0], s.experts_per_token)).ptr or None
            io.weights = self._ones().ptr
            self._put_scale(io, x_scale, rows.shape[0])
        stage = None
        if do_recv:
            out = self._row_view(out_x, "out_expert_x", (i.n_local_experts, i.row_cap, s.hidden_dim))
            if out.dtype != rows.dtype:
                raise ArgumentError(f"out_expert_x has dtype {out.dtype}; legal: that of dp_x, {rows.dtype}")
            io.out_x = out.ptr or None
            io.out_counts = look(counts, "out_expert_num_tokens", ("int32",), self._device, (i.n_local_experts,)).ptr or None
            stage = self._put_out_scale(io, out_scale)
        self._run("dispatch", io, do_send, do_recv, (counts, out_x, out_scale, x, x_scale, indices, bound_m))
        if do_send:
            self._m, self._n = rows.shape[0], io.n_tokens
        if stage is not None:
            copy_rows(out_scale, stage[..., :out_scale.shape[-1]], counts)

    def _row_view(self, obj: Any, field: str, shape: Tuple[Optional[int], ...]) -> View:
        v = view(obj, field)
        if v.itemsize != self._shape.itemsize or (v.itemsize == 1 and v.dtype not in _ONE_BYTE):
            raise ArgumentError(f"{field} has dtype {v.dtype}; legal: {self._shape.itemsize} bytes a channel, as hidden_dim_bytes "
                                f"{self._shape.hidden_dim_bytes} says")
        return look(v, field, (v.dtype,), self._device, shape)

    def _put_scale(self, io: Any, scale: Any, m: int) -> None:
        """x_scale: the caller's where its layout is libepx's, else a copy; ones when the rows have no scales."""
        words, n = self._info.scale_words, self._shape.n_scales
        if (scale is None) != (n == 0):
            raise ArgumentError(f"dp_x_scale is {'None' if scale is None else 'given'} with hidden_dim_scale_bytes "
                                f"{self._shape.hidden_dim_scale_bytes}; legal: {'None' if n == 0 else f'[m, 1 to {n}]'}")
        if self._shape.itemsize != 1:
            return
        if scale is None:
            io.x_scale = view(self._buffer("scale_ones", (self._shape.max_num_tokens, words), "float32", 1.0), "scale").ptr
            return
        v = look(scale, "dp_x_scale", ("float32",), self._device, (m, None), any_order=True)
        self._check_columns("dp_x_scale", v)
        if v.shape[1] == words and view(scale, "dp_x_scale").contiguous():
            io.x_scale = v.ptr or None
            return
        stage = self._buffer("x_scale", (self._shape.max_num_tokens, words), "float32", 0.0)
        copy(prefix(stage, m, v.shape[1]), scale)
        io.x_scale = view(stage, "scale").ptr

    def _check_columns(self, field: str, v: View) -> None:
        if not 1 <= v.shape[-1] <= self._shape.n_scales:
            raise ArgumentError(f"{field} has {v.shape[-1]} scales a row; legal: 1 to {self._shape.n_scales}, as hidden_dim_scale_bytes says")

    def _put_out_scale(self, io: Any, scale: Any) -> Any:
        """out_scale; the buffer that must be copied to the caller's array afterwards, or None."""
        i, n = self._info, self._shape.n_scales
        if (scale is None) != (n == 0):
            raise ArgumentError(f"out_expert_x_scale is {'None' if scale is None else 'given'} with hidden_dim_scale_bytes "
                                f"{self._shape.hidden_dim_scale_bytes}; legal: {'None' if n == 0 else f'[El, T * G, 1 to {n}]'}")
        if self._shape.itemsize != 1:
            return None
        shape = (i.n_local_experts, i.row_cap, i.scale_words)
        if scale is not None:
            v = look(scale, "out_expert_x_scale", ("float32",), self._device, shape[:2] + (None,), any_order=True)
            self._check_columns("out_expert_x_scale", v)
            if v.shape == shape and view(scale, "out_expert_x_scale").contiguous():
                io.out_scale = v.ptr or None
                return None
        stage = self._buffer("out_scale", shape, "float32", 0.0)
        io.out_scale = view(stage, "scale").ptr or None
        return None if scale is None else stage

    def _run(self, what: str, io: Any, do_send: bool, do_recv: bool, objects: Tuple[Any, ...]) -> None:
        if not (do_send or do_recv):
            raise ArgumentError("do_send and do_recv are both False; legal: one of them, or both")
        name = f"epx_{what}" + ("" if do_send and do_recv else "_send" if do_send else "_recv")
        self.plan._call(name, io, 0, None if self._tensors else objects)  # torch's allocator keeps tensors for the stream
        keep_for_stream(objects, self._device)

    # ---- combine ----

    def combine(self, out_tokens: Any, indices: Any, weights: Any, expert_y: Any, bound_m: Any, do_send: bool = True,
                do_recv: bool = True) -> None:
        """Send the experts' rows back, and sum them at their tokens: out_tokens[t] = sum over k, in order, of weights[t, k] * row, in f32,
        rounded once.

        out_tokens [m or more, H]       bfloat16, float16 (or float32); rows past the tokens are not written
        indices [m, K]                  as given to dispatch
        weights [m, K] float32          any row stride
        expert_y [El, T * G, H]         float32, bfloat16 or float16
        """
        if self._ops is not None and isinstance(expert_y, self._tensor_type):
            self._ops.all_to_all_combine(self._handle, out_tokens, indices, weights, expert_y, bound_m, do_send, do_recv)
        else:
            self.run_combine(out_tokens, indices, weights, expert_y, bound_m, do_send, do_recv)

    def run_combine(self, out_tokens: Any, indices: Any, weights: Any, y: Any, bound_m: Any, do_send: bool, do_recv: bool) -> None:
        """combine() itself, without the operator."""
        s, i = self._shape, self._info
        self._tensors = is_tensor(y)
        expert = self._float_view(y, "expert_y")
        out = self._float_view(out_tokens, "out_tokens")
        ids = look(indices, "indices", ("uint32", "int32"), self._device, (None, s.experts_per_token))
        if ids.shape[0] != self._m:
            raise ArgumentError(f"indices has {ids.shape[0]} rows; legal: the {self._m} rows of dispatch")
        look(y, "expert_y", (expert.dtype,), self._device, (i.n_local_experts, i.row_cap, s.hidden_dim))
        look(out_tokens, "out_tokens", (out.dtype,), self._device, (self._m if self._device >= 0 else self._n, s.hidden_dim), True)
        if do_send:
            self._match(FLOATS[expert.dtype], FLOATS[out.dtype], ids, bound_m)
        elif self._dtypes[0] != FLOATS[expert.dtype]:
            raise ArgumentError(f"expert_y has dtype {expert.dtype}; the sending half had {_NAMES[self._dtypes[0]]}")
        w = row_major(weights)
        io = self.plan._io(0, None)
        io.x = expert.ptr or None
        io.combine_weights = look(w, "weights", ("float32",), self._device, (self._m, s.experts_per_token)).ptr or None
        stage = None
        if FLOATS[out.dtype] != self.plan.result_dtype:
            stage = self._buffer("result", (s.max_num_tokens, s.hidden_dim), _NAMES[self.plan.result_dtype], 0.0)
        io.out_x = (out if stage is None else view(stage, "stage")).ptr or None
        self._run("combine", io, do_send, do_recv, (out_tokens, indices, w, y, bound_m))
        if stage is not None and do_recv:
            m = self._m if self._device >= 0 else self._n
            counts = bound_m if bound_m is not None and self._device >= 0 else m
            copy_rows(out_tokens[:m], stage[:m], counts)

    def _float_view(self, obj: Any, field: str) -> View:
        v = view(obj, field)
        if v.dtype not in FLOATS:
            raise ArgumentError(f"{field} has dtype {v.dtype}; legal: float32, bfloat16 (in numpy also as uint16), float16")
        return v

    def _match(self, expert: str, out: str, ids: View, bound_m: Any) -> None:
        """Make the plan that these dtypes need, if it is not there: a new one takes over the exchange that is open."""
        if _plan_dtypes(self._shape.itemsize, expert, out) == _plan_dtypes(self._shape.itemsize, *self._dtypes):
            return
        if self._fixed:
            raise ArgumentError(f"expert_y is {_NAMES[expert]} and out_tokens {_NAMES[out]}; this AllToAll was made for expert_dtype "
                                f"{_NAMES[self._dtypes[0]]} and out_dtype {_NAMES[self._dtypes[1]]}")
        _refuse_capture(f"combine with expert_y {_NAMES[expert]} and out_tokens {_NAMES[out]} needs another plan")
        self._stop_watch()
        self._plan.close()
        self._make_plan(expert, out)
        self._redispatch(ids, bound_m)

    def _redispatch(self, ids: View, bound_m: Any) -> None:
        """Give the new plan the routing of the open exchange; its rows are of no use and empty."""
        s, i = self._shape, self._info
        io = self._common(bound_m, self._m, "indices")
        byte_rows = s.hidden_dim * s.itemsize
        scratch: List[Any] = [full(self._tensors, self._device, (s.max_num_tokens, byte_rows), "uint8", 0),
                              full(self._tensors, self._device, (i.n_local_experts, i.row_cap, byte_rows), "uint8", 0),
                              full(self._tensors, self._device, (max(i.n_local_experts, 1),), "int32", 0)]
        io.x, io.out_x, io.out_counts = (view(a, "scratch").ptr for a in scratch)
        io.ids = ids.ptr or None
        io.weights = self._ones().ptr
        if s.itemsize == 1:
            io.x_scale = view(self._buffer("scale_ones", (s.max_num_tokens, i.scale_words), "float32", 1.0), "scale").ptr
            io.out_scale = view(self._buffer("out_scale", (i.n_local_experts, i.row_cap, i.scale_words), "float32", 0.0), "scale").ptr
        self._run("dispatch", io, True, True, tuple(scratch))

    # ---- the end ----

    def poll(self) -> None:
        """Raise the first error that was found here, at a peer or on the GPU (epx.TimeoutError, PeerError, AbortedError). Never blocks; call
        it after replays of a graph, which cannot report by themselves."""
        self.plan.poll()

    def destroy(self) -> None:
        """Give the memory back. Collective; a second call does nothing."""
        self._stop_watch()
        for obj in (self._plan, self._group, self._world if self._own_world else None):
            if obj is not None:
                obj.close()
        self._plan = self._group = None
        self._own_world = False
        self._buffers = {}
