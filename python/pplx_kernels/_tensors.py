"""The few array operations that staging needs, for numpy and torch alike. torch is used only when the caller has loaded it."""
import ctypes
import sys
from typing import Any, Optional, Sequence

from epx._arrays import View, checked, view
from epx._errors import ArgumentError

# dtype of an array -> name in libepx. numpy has no bfloat16 of its own: uint16 stands for it.
FLOATS = {"float32": "f32", "bfloat16": "bf16", "uint16": "bf16", "float16": "f16"}


def torch_module() -> Any:
    """torch if this process has loaded it, else None."""
    return sys.modules.get("torch")


def is_tensor(obj: Any) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(obj, torch.Tensor)


def numpy_module() -> Any:
    try:
        import numpy
        return numpy
    except ImportError:
        raise ArgumentError("this call needs a buffer of its own, for which numpy or torch must be installed") from None


def full(like_torch: bool, device: int, shape: Sequence[int], dtype: str, value: float) -> Any:
    """A new array; dtype: a name that numpy and torch share."""
    if not like_torch:
        return numpy_module().full(tuple(shape), value, dtype)
    torch = torch_module()
    where = torch.device("cpu" if device < 0 else f"cuda:{device}")
    return torch.full(tuple(shape), value, dtype=getattr(torch, dtype), device=where)


def prefix(array: Any, rows: int, columns: int) -> Any:
    """The first columns of the last axis of the first rows."""
    return array[:rows, ..., :columns]


def copy(dst: Any, src: Any) -> None:
    if is_tensor(dst):
        dst.copy_(src)
    else:
        numpy_module().copyto(dst, src, casting="unsafe")


def copy_rows(dst: Any, src: Any, counts: Any) -> None:
    """dst[.., r, :] = src[.., r, :] for r < counts (an int, or [El] or [1]); other rows of dst stay. No host synchronisation."""
    if isinstance(counts, int):
        copy(dst[:counts], src[:counts])
        return
    n = dst.shape[-2]
    if is_tensor(dst):
        torch = torch_module()
        mask = torch.arange(n, device=dst.device) < counts.to(torch.int64)[:, None]
        mask = mask[..., None] if dst.dim() == 3 else mask.reshape(n, 1)
        dst.copy_(torch.where(mask, src.to(dst.dtype), dst))
        return
    np = numpy_module()
    np.copyto(dst, src, where=(np.arange(n) < counts[:, None])[..., None], casting="unsafe")


def row_major(obj: Any) -> Any:
    """`obj`, or a copy of it in C order."""
    if view(obj, "array").contiguous():
        return obj
    return obj.contiguous() if is_tensor(obj) else numpy_module().ascontiguousarray(obj)


def scalar(obj: Any) -> int:
    """Value of an array of one uint32 on the CPU."""
    v = look(obj, "bound_m", ("uint32", "int32"), -1, (1,))
    return ctypes.c_uint32.from_address(v.ptr).value


def keep_for_stream(objects: Sequence[Any], device: int) -> None:
    """Tell torch's allocator that the current stream uses these tensors, so that it does not hand their memory on too early."""
    torch = torch_module()
    if device < 0 or torch is None or torch.cuda.is_current_stream_capturing():
        return
    stream = torch.cuda.current_stream(device)
    for o in objects:
        if o is not None and is_tensor(o) and o.is_cuda:
            o.record_stream(stream)


def look(obj: Any, field: str, dtypes: Sequence[str], device: int, shape: Sequence[Optional[int]], at_least: bool = False,
         any_order: bool = False) -> View:
    """As epx._arrays.checked(), any_order: strides are the caller's business."""
    v = view(obj, field)
    if any_order:
        v = View(v.ptr, v.shape, None, v.dtype, v.itemsize, v.device, v.owner)
    return checked(v, field, tuple(dtypes), device, shape, at_least)
