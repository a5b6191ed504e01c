"""The Python API of pplx_kernels over libepx: AllToAll for dispatch and combine, and the calls around NVSHMEM that its users make.

torch is optional: arrays of numpy work on CPUs. With torch, dispatch and combine are operators (torch.ops.pplx_kernels) that
torch.compile knows, work is put on the current stream, and can be captured in CUDA graphs. docs/python.md has the differences to pplx_kernels.
"""
from .all_to_all import AllToAll
from .nvshmem import (PyTorchStreamWrapper, nvshmem_alloc_empty_unique_id, nvshmem_alltoall, nvshmem_barrier_all,
                      nvshmem_barrier_all_on_current_stream, nvshmem_finalize, nvshmem_get_unique_id, nvshmem_init, nvshmem_malloc,
                      nvshmem_my_pe, nvshmem_n_pes, nvshmem_unique_id_size)

__all__ = [
    "AllToAll", "PyTorchStreamWrapper", "nvshmem_alloc_empty_unique_id", "nvshmem_alltoall", "nvshmem_barrier_all",
    "nvshmem_barrier_all_on_current_stream", "nvshmem_finalize", "nvshmem_get_unique_id", "nvshmem_init", "nvshmem_malloc",
    "nvshmem_my_pe", "nvshmem_n_pes", "nvshmem_unique_id_size"
]
