"""epx: expert-parallel exchange for Mixture-of-Experts models, from Python.

    world = epx.World("tcp:127.0.0.1:7000", rank=rank, n_ranks=2)
    group = world.group()
    plan = group.plan(max_tokens=8, hidden=64, top_k=2, n_experts=4, layout="expert_major")
    plan.dispatch(x, ids, weights, out_x=rows, out_counts=counts)
    ...                                   # the experts work on rows
    plan.combine(rows, out)

libepx does the work; it is opened at the first call (EPX_LIBRARY, this package's folder, pkg-config, the loader's path).
"""
import ctypes
from typing import Any, Callable, List, NamedTuple, Optional

from . import _library
from ._arrays import Array
from ._errors import (AbortedError, ArgumentError, CapacityError, Error, FormatError, InternalError, LibraryNotFoundError,
                      MismatchError, NotFoundError, OutOfMemoryError, PeerError, StateError, SystemFailure, TimeoutError,
                      TransferError, UnsupportedError)
from ._library import library
from ._plan import Lists, Plan, PlanConfig, PlanInfo, PlanStats
from ._world import Group, GroupCaps, World, plan_bytes

__all__ = [
    "World", "Group", "Plan", "PlanConfig", "PlanInfo", "PlanStats", "GroupCaps", "Lists", "Array", "Component", "plan_bytes",
    "version", "library_path", "components", "set_log", "Error", "ArgumentError", "StateError", "UnsupportedError", "MismatchError",
    "CapacityError", "NotFoundError", "OutOfMemoryError", "SystemFailure", "TransferError", "FormatError", "TimeoutError",
    "PeerError", "AbortedError", "InternalError", "LibraryNotFoundError"
]


class Component(NamedTuple):
    """A transport, backend or device that the library has; detail: what it is, or why it is not available."""

    kind: str
    name: str
    available: bool
    detail: str


def version() -> str:
    """Of libepx, "0.1.0"."""
    return library().epx_version().decode()


def library_path() -> str:
    """What was opened."""
    return library().path


def components() -> List[Component]:
    """What this build has, in order of preference."""
    found: List[Component] = []
    raw = _library.Component()
    while True:
        try:
            library().epx_component(len(found), ctypes.byref(raw))
        except NotFoundError:
            return found
        found.append(Component(raw.kind.decode(), raw.name.decode(), bool(raw.available), raw.detail.decode()))


_log: Any = None


def set_log(f: Optional[Callable[[int, str], None]]) -> None:
    """f(level, message) gets the library's log lines (0 error, 1 warning, 2 info, 3 debug), from any thread; None: nobody does."""
    global _log
    new = _library.LOG(0) if f is None else _library.LOG(lambda _ctx, level, message: f(level, message.decode(errors="replace")))
    library().epx_set_log(new, None)
    _log = new
