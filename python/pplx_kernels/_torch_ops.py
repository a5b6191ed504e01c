"""torch.ops.pplx_kernels: dispatch and combine as operators with fake kernels, so that torch.compile can trace them. Defined when the
first AllToAll is made in a process that has loaded torch."""
import itertools
import weakref
from typing import Any, Optional

import epx

from ._tensors import torch_module

_SCHEMAS = {
    "all_to_all_dispatch":
        "(int handle, Tensor(a!) out_expert_num_tokens, Tensor(b!) out_expert_x, Tensor(c!)? out_expert_x_scale, Tensor dp_x, "
        "Tensor? dp_x_scale, Tensor indices, Tensor? bound_m, bool do_send, bool do_recv) -> ()",
    "all_to_all_combine":
        "(int handle, Tensor(a!) out_tokens, Tensor indices, Tensor weights, Tensor expert_y, Tensor? bound_m, bool do_send, "
        "bool do_recv) -> ()",
}
_objects: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_handles = itertools.count(1)
_library: Any = None


def register(obj: Any) -> int:
    """A number that operators know the object by."""
    handle = next(_handles)
    _objects[handle] = obj
    return handle


def _object(handle: int) -> Any:
    obj = _objects.get(handle)
    if obj is None:
        raise epx.ArgumentError(f"handle is {handle}; legal: that of an AllToAll that lives")
    return obj


def _dispatch(handle: int, *args: Any) -> None:
    _object(handle).run_dispatch(*args)


def _combine(handle: int, *args: Any) -> None:
    _object(handle).run_combine(*args)


def _fake(*_args: Any) -> None:
    """The outputs are the caller's: nothing to make up."""


def operators() -> Optional[Any]:
    """torch.ops.pplx_kernels, or None without torch."""
    global _library
    torch = torch_module()
    if torch is None:
        return None
    if _library is None:
        lib = torch.library.Library("pplx_kernels", "DEF")
        for name, kernel in (("all_to_all_dispatch", _dispatch), ("all_to_all_combine", _combine)):
            lib.define(name + _SCHEMAS[name])
            lib.impl(name, kernel, "CompositeExplicitAutograd")
            torch.library.register_fake(f"pplx_kernels::{name}", _fake, lib=lib)
        _library = lib
    return torch.ops.pplx_kernels
