"""Finds and opens libepx, and declares its structs and calls. ctypes lets go of the interpreter lock during every call."""
import ctypes
import os
import shutil
import subprocess
import threading
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, List, Optional

from ._errors import BY_CODE, Error, InternalError, LibraryNotFoundError

SONAME = "libepx.so.0"

ALLGATHER = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)
BARRIER = ctypes.CFUNCTYPE(c_int, c_void_p)
LOG = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class WorldConfig(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("rank", c_int), ("n_ranks", c_int), ("bootstrap", c_char_p), ("allgather", ALLGATHER),
                ("barrier", BARRIER), ("ctx", c_void_p), ("transports", c_char_p), ("timeout_ns", c_uint64)]


class GroupCaps(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("n_ranks", c_int), ("rank", c_int), ("transport", c_char_p), ("links", c_uint32),
                ("max_top_k", c_int), ("max_ranks", c_int), ("token_dtypes", c_uint32)]


class PlanConfig(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("max_tokens", c_int), ("hidden", c_int), ("top_k", c_int), ("n_experts", c_int),
                ("n_slots", c_int), ("slot_rank", POINTER(c_int)), ("slot_expert", POINTER(c_int)),
                ("placement_version", c_uint64), ("token_dtype", c_int), ("wire_dtype", c_int), ("expert_dtype", c_int),
                ("combine_dtype", c_int), ("scale_block", c_int), ("scale_format", c_int), ("scale_layout", c_int),
                ("layout", c_int), ("align", c_int), ("combine", c_int), ("replicate", c_int), ("n_channels", c_int),
                ("n_blocks", c_int), ("renormalize", c_int), ("backend", c_char_p), ("timeout_ns", c_uint64), ("debug", c_int)]


class Io(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("x", c_void_p), ("x_scale", c_void_p), ("ids", c_void_p), ("weights", c_void_p),
                ("n_tokens", c_int), ("n_tokens_device", c_void_p), ("out_x", c_void_p), ("out_scale", c_void_p),
                ("out_counts", c_void_p), ("out_histogram", c_void_p), ("add", c_void_p), ("stream", c_void_p),
                ("channel", c_int), ("combine_weights", c_void_p)]


class PlanInfo(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("backend", c_char_p), ("transport", c_char_p), ("layout", c_int), ("n_local_experts", c_int),
                ("placement_version", c_uint64), ("row_cap", c_int), ("max_rows", c_size_t), ("scale_words", c_size_t),
                ("scale_gap", c_size_t), ("slab_bytes", c_size_t), ("private_bytes", c_size_t), ("epoch", c_uint64),
                ("backend_why", c_char_p)]


class PlanStats(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("n_ranks", c_int), ("n_dispatches", c_uint64), ("n_combines", c_uint64),
                ("rows_sent", POINTER(c_uint64)), ("rows_received", POINTER(c_uint64)), ("dispatch_bytes", c_uint64),
                ("combine_bytes", c_uint64), ("wait_ns", c_uint64)]


class ListEntry(ctypes.Structure):
    _fields_ = [("src", c_uint32), ("token", c_uint32)]


class Lists(ctypes.Structure):
    _fields_ = [("n_local_experts", c_int32), ("n_rows", c_int32), ("expert_off", c_void_p), ("entries", c_void_p),
                ("row_base", c_void_p), ("scale_base", c_void_p), ("row_stride_bytes", c_uint64), ("scale_stride", c_uint64)]


class Component(ctypes.Structure):
    _fields_ = [("kind", c_char_p), ("name", c_char_p), ("available", c_int), ("detail", c_char_p)]


# name: (result, arguments). A result of "status" is checked.
CALLS = {
    "epx_version": (c_char_p, []),
    "epx_status_text": (c_char_p, [c_int]),
    "epx_last_error": (c_char_p, []),
    "epx_set_log": (None, [LOG, c_void_p]),
    "epx_world_config_init": (None, [POINTER(WorldConfig)]),
    "epx_world_create": ("status", [POINTER(WorldConfig), POINTER(c_void_p)]),
    "epx_world_create_local": ("status", [c_int, POINTER(c_void_p)]),
    "epx_world_rank": (c_int, [c_void_p]),
    "epx_world_size": (c_int, [c_void_p]),
    "epx_world_destroy": (None, [c_void_p]),
    "epx_group_create": ("status", [c_void_p, POINTER(c_int), c_int, c_int, POINTER(c_void_p)]),
    "epx_group_rank": (c_int, [c_void_p]),
    "epx_group_size": (c_int, [c_void_p]),
    "epx_group_caps": ("status", [c_void_p, POINTER(GroupCaps)]),
    "epx_group_allgather": ("status", [c_void_p, c_void_p, c_size_t, c_void_p, c_uint64]),
    "epx_group_mask": ("status", [c_void_p, c_int, c_int]),
    "epx_group_dead_rank": (c_int, [c_void_p]),
    "epx_group_destroy": (None, [c_void_p]),
    "epx_plan_config_init": (None, [POINTER(PlanConfig)]),
    "epx_io_init": (None, [POINTER(Io)]),
    "epx_plan_bytes": ("status", [POINTER(PlanConfig), c_int, POINTER(c_size_t)]),
    "epx_plan_bytes_hosts": ("status", [POINTER(PlanConfig), c_int, c_int, POINTER(c_size_t)]),
    "epx_group_plan_bytes": ("status", [c_void_p, POINTER(PlanConfig), POINTER(c_size_t)]),
    "epx_plan_create": ("status", [c_void_p, POINTER(PlanConfig), POINTER(c_void_p)]),
    "epx_plan_info": ("status", [c_void_p, POINTER(PlanInfo)]),
    "epx_plan_stats": ("status", [c_void_p, POINTER(PlanStats)]),
    "epx_plan_input": ("status", [c_void_p, c_int, POINTER(c_void_p)]),
    "epx_plan_lists": ("status", [c_void_p, c_int, POINTER(Lists)]),
    "epx_plan_offsets": ("status", [c_void_p, c_int, POINTER(c_void_p)]),
    "epx_dispatch_send": ("status", [c_void_p, POINTER(Io)]),
    "epx_dispatch_recv": ("status", [c_void_p, POINTER(Io)]),
    "epx_combine_send": ("status", [c_void_p, POINTER(Io)]),
    "epx_combine_recv": ("status", [c_void_p, POINTER(Io)]),
    "epx_dispatch": ("status", [c_void_p, POINTER(Io)]),
    "epx_combine": ("status", [c_void_p, POINTER(Io)]),
    "epx_plan_poll": ("status", [c_void_p]),
    "epx_plan_abort": ("status", [c_void_p]),
    "epx_plan_recover": ("status", [c_void_p]),
    "epx_plan_missing": ("status", [c_void_p, c_int, POINTER(c_int), POINTER(POINTER(c_uint8))]),
    "epx_plan_set_placement": ("status", [c_void_p, POINTER(c_int), POINTER(c_int), c_uint64, c_uint64]),
    "epx_plan_destroy": (None, [c_void_p]),
    "epx_component": ("status", [c_int, POINTER(Component)]),
}


class Library:
    """libepx, opened: each call of CALLS as an attribute; those with a status raise the exception of that status."""

    def __init__(self, path: str, dll: ctypes.CDLL):
        self.path = path
        for name, (result, arguments) in CALLS.items():
            f = getattr(dll, name)
            f.argtypes = arguments
            f.restype = c_int if result == "status" else result
            setattr(self, name, self._checked(f) if result == "status" else f)
        for init, struct in ((self.epx_world_config_init, WorldConfig), (self.epx_plan_config_init, PlanConfig),
                             (self.epx_io_init, Io)):
            s = _roomy(struct)
            init(s)
            if s.size != ctypes.sizeof(struct):
                raise AttributeError(f"its {struct.__name__} has {s.size} bytes, this package's has {ctypes.sizeof(struct)}")

    def _checked(self, f: Any) -> Any:
        last_error = self.epx_last_error

        def call(*args: Any) -> None:
            status = f(*args)
            if status < 0:
                raise error_of(status, last_error().decode(errors="replace"))

        return call

    def __getattr__(self, name: str) -> Any:  # for type checkers; real calls are attributes
        raise AttributeError(name)


def _roomy(struct: Any) -> Any:
    """One struct with room behind it, for a library whose struct is longer."""
    buffer = (ctypes.c_char * (ctypes.sizeof(struct) + 4096))()
    return struct.from_buffer(buffer)


def error_of(code: int, message: str) -> Error:
    kind = BY_CODE.get(code)
    return kind(message) if kind is not None else InternalError(f"status {code}: {message}")


def _pkg_config_folder() -> Optional[str]:
    if shutil.which("pkg-config") is None:
        return None
    run = subprocess.run(["pkg-config", "--variable=libdir", "epx"], capture_output=True, text=True)
    return run.stdout.strip() or None if run.returncode == 0 else None


def _candidates() -> List[str]:
    given = os.environ.get("EPX_LIBRARY")
    if given:
        return [given]
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.join(here, SONAME), os.path.join(here, "lib", SONAME)]
    folder = _pkg_config_folder()
    return paths + ([os.path.join(folder, SONAME)] if folder else []) + [SONAME]


def _open() -> Library:
    tried = []
    for path in _candidates():
        if os.path.isabs(path) and not os.path.exists(path):
            tried.append(f"{path}: no such file")
            continue
        try:
            return Library(path, ctypes.CDLL(path))
        except (OSError, AttributeError) as e:
            tried.append(f"{path}: {e}")
    raise LibraryNotFoundError("libepx was not found. Tried: " + "; ".join(tried) +
                               ". Set EPX_LIBRARY to the path of libepx.so.0 (in a build folder: build/release/lib/libepx.so.0)")


_lock = threading.Lock()
_library: Optional[Library] = None


def library() -> Library:
    """libepx, opened at the first call. LibraryNotFoundError with what was tried."""
    global _library
    with _lock:
        if _library is None:
            _library = _open()
        return _library
