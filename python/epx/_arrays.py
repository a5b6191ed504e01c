"""What a caller's array is: where it lies, its shape and dtype. Nothing is copied.

Taken are: the buffer protocol and __array_interface__ (numpy), __cuda_array_interface__ (cupy, numba), tensors of torch, and
whatever has __dlpack__ (jax and others).
"""
import ctypes
import sys
from ctypes import c_char_p, c_int, c_int32, c_int64, c_ssize_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, Optional, Sequence, Tuple

from ._errors import ArgumentError

# Name of a dtype in libepx: number, bytes, names that arrays may have. Arrays without the dtype itself use an unsigned integer.
DTYPES = {
    "f32": (0, 4, ("float32",)),
    "bf16": (1, 2, ("bfloat16", "uint16")),
    "f16": (2, 2, ("float16",)),
    "fp8_e4m3": (3, 1, ("float8_e4m3fn", "float8_e4m3", "uint8", "int8")),
    "bytes": (4, 1, ("uint8",)),
}
INT32 = ("int32", "uint32")
FLOAT32 = ("float32",)
WORDS = ("float32", "uint32", "int32")


class View:
    """ptr, shape, strides in bytes (None: C order), dtype name, bytes an element, device (-1: CPU), and the object that owns it."""

    __slots__ = ("ptr", "shape", "strides", "dtype", "itemsize", "device", "owner")

    def __init__(self, ptr: int, shape: Sequence[int], strides: Optional[Sequence[int]], dtype: str, itemsize: int, device: int,
                 owner: Any):
        self.ptr, self.shape, self.strides = ptr or 0, tuple(shape), strides
        self.dtype, self.itemsize, self.device, self.owner = dtype, itemsize, device, owner

    def contiguous(self) -> bool:
        if self.strides is None or 0 in self.shape:
            return True
        step = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(tuple(self.strides))):
            if n != 1 and stride != step:
                return False
            step *= n
        return True


class Array:
    """Memory of the library as an array: numpy.asarray(a) on CPU, torch.as_tensor(a) or cupy.asarray(a) on a GPU. bf16 is seen as
    uint16, fp8 as uint8. Borrowed: valid as long as the call that gave it says."""

    _TYPES = {"f32": "<f4", "bf16": "<u2", "f16": "<f2", "fp8_e4m3": "|u1", "i32": "<i4", "u32": "<u4", "u8": "|u1"}

    def __init__(self, ptr: int, shape: Sequence[int], dtype: str, device: int, owner: Any):
        self.ptr, self.shape, self.dtype, self.device, self._owner = ptr, tuple(shape), dtype, device, owner

    def _interface(self) -> dict:
        return {"shape": self.shape, "typestr": self._TYPES[self.dtype], "data": (self.ptr, False), "version": 3}

    @property
    def __array_interface__(self) -> dict:
        if self.device >= 0:
            raise AttributeError("this array lies on a GPU")
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> dict:
        if self.device < 0:
            raise AttributeError("this array lies on the CPU")
        return self._interface()

    def __repr__(self) -> str:
        return f"epx.Array(shape={self.shape}, dtype={self.dtype!r}, device={self.device})"


# ---- the buffer protocol, also of read-only objects ----


class _PyBuffer(ctypes.Structure):
    _fields_ = [("buf", c_void_p), ("obj", ctypes.py_object), ("len", c_ssize_t), ("itemsize", c_ssize_t), ("readonly", c_int),
                ("ndim", c_int), ("format", c_char_p), ("shape", ctypes.POINTER(c_ssize_t)),
                ("strides", ctypes.POINTER(c_ssize_t)), ("suboffsets", ctypes.POINTER(c_ssize_t)), ("internal", c_void_p)]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes, _get_buffer.restype = [ctypes.py_object, ctypes.POINTER(_PyBuffer), c_int], c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = [ctypes.POINTER(_PyBuffer)], None


class _Held:
    """A buffer that is released when this object goes."""

    def __init__(self, obj: Any):
        self.raw = _PyBuffer()
        _get_buffer(obj, ctypes.byref(self.raw), 0)  # PyBUF_SIMPLE

    def __del__(self) -> None:
        _release_buffer(ctypes.byref(self.raw))


_FORMATS = {"f": "float32", "e": "float16", "d": "float64", "i": "int32", "I": "uint32", "l": "int64", "L": "uint64", "q": "int64",
            "Q": "uint64", "H": "uint16", "h": "int16", "B": "uint8", "b": "int8", "c": "uint8"}


def _from_buffer(obj: Any) -> View:
    m = memoryview(obj)
    if not m.c_contiguous:
        raise ArgumentError("a buffer is not contiguous in C order")
    held = _Held(obj)
    return View(held.raw.buf or 0, m.shape or (), None, _FORMATS.get(m.format.lstrip("@=<"), m.format), m.itemsize, -1, held)


# ---- array interfaces ----

_KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool", "V": "void", "c": "complex"}


def _dtype_of(obj: Any, typestr: str) -> str:
    name = getattr(getattr(obj, "dtype", None), "name", None)
    return name if isinstance(name, str) else f"{_KINDS.get(typestr[1], typestr[1])}{int(typestr[2:]) * 8}"


def _from_interface(obj: Any, i: dict, device: int) -> View:
    if i["typestr"][0] == ">":
        raise ArgumentError(f"an array of typestr {i['typestr']} is in the other byte order; legal: little-endian")
    return View(i["data"][0], i["shape"], i.get("strides"), _dtype_of(obj, i["typestr"]), int(i["typestr"][2:]), device, obj)


def _cuda_device(obj: Any) -> int:
    device = getattr(obj, "device", None)  # cupy: .id; numba and epx.Array: the group's device is taken on trust
    return int(getattr(device, "id", device if isinstance(device, int) else 0))


# ---- torch ----


def _from_torch(t: Any) -> View:
    device = t.device.index if t.is_cuda else -1
    if not t.is_cuda and t.device.type != "cpu":
        raise ArgumentError(f"a tensor lies on device {t.device}; legal: cpu, cuda")
    size = t.element_size()
    return View(t.data_ptr(), tuple(t.shape), tuple(s * size for s in t.stride()), str(t.dtype).split(".")[-1], size, device, t)


# ---- DLPack ----


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", ctypes.POINTER(c_int64)),
                ("strides", ctypes.POINTER(c_int64)), ("byte_offset", c_uint64)]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, c_char_p], c_void_p
_CPU_TYPES, _CUDA_TYPES = (1, 3), (2, 13)  # kDLCPU, kDLCUDAHost; kDLCUDA, kDLCUDAManaged
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}


def _from_dlpack(obj: Any) -> View:
    on_cuda = int(obj.__dlpack_device__()[0]) in _CUDA_TYPES
    capsule = obj.__dlpack__(stream=-1) if on_cuda else obj.__dlpack__()  # -1: no synchronisation; the stream is the call's
    t = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    if t.device_type not in _CPU_TYPES + _CUDA_TYPES or t.lanes != 1:
        raise ArgumentError(f"a DLPack array has device type {t.device_type} and {t.lanes} lanes; legal: CPU, CUDA and 1")
    shape = tuple(t.shape[i] for i in range(t.ndim))
    size = t.bits // 8
    strides = tuple(t.strides[i] * size for i in range(t.ndim)) if t.strides else None
    dtype = "float8_e4m3fn" if t.code == 10 else f"{_CODES.get(t.code, 'opaque')}{t.bits}"
    return View((t.data or 0) + t.byte_offset, shape, strides, dtype, size, t.device_id if on_cuda else -1, (capsule, obj))


def view(obj: Any, field: str) -> View:
    """What `obj` is. ArgumentError naming `field` when it is no array."""
    if isinstance(obj, View):
        return obj
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _from_torch(obj)
    try:
        for name, device in (("__cuda_array_interface__", _cuda_device), ("__array_interface__", lambda _: -1)):
            interface = getattr(obj, name, None)
            if interface is not None:
                return _from_interface(obj, interface, device(obj))
        if hasattr(obj, "__dlpack__"):
            return _from_dlpack(obj)
        return _from_buffer(obj)
    except ArgumentError as e:
        raise ArgumentError(f"{field}: {e.message}") from None
    except TypeError:
        raise ArgumentError(f"{field} is a {type(obj).__name__}; legal: an array of numpy, cupy or torch, or an object with "
                            "__dlpack__, __cuda_array_interface__ or the buffer protocol") from None


def checked(obj: Any, field: str, dtypes: Tuple[str, ...], device: int, shape: Sequence[Optional[int]],
            at_least: bool = False) -> View:
    """View of `obj` with its dtype, device, order and shape checked.

    shape     wanted extents; None: any. at_least: the first may be larger
    device    -1: CPU; else the group's CUDA device
    """
    v = view(obj, field)
    if v.dtype not in dtypes:
        raise ArgumentError(f"{field} has dtype {v.dtype}; legal: {', '.join(dtypes)}")
    if (v.device < 0) != (device < 0):
        where = "the CPU" if v.device < 0 else f"CUDA device {v.device}"
        raise ArgumentError(f"{field} lies on {where}; legal: " + ("the CPU" if device < 0 else f"CUDA device {device}"))
    fits = len(v.shape) == len(shape) and all(
        w is None or n == w or (at_least and i == 0 and n >= w) for i, (n, w) in enumerate(zip(v.shape, shape)))
    if not fits:
        legal = ", ".join(("any" if w is None else f"{w} or more" if at_least and i == 0 else str(w)) for i, w in enumerate(shape))
        raise ArgumentError(f"{field} has shape {list(v.shape)}; legal: [{legal}]")
    if not v.contiguous():
        raise ArgumentError(f"{field} has strides {list(v.strides or ())} bytes; legal: contiguous, in C order")
    return v
