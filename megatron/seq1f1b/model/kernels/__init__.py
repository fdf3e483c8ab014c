"""Attention kernels: what a kernel must offer, and which one serves a tensor."""

from torch import Tensor

from .cpu import CpuFlash
from .cuda import CudaFlash
from .interface import Gradients, Kernel
from .padded import Padded

__all__ = ["Gradients", "Kernel", "kernel_for"]


def kernel_for(query: Tensor, value: Tensor) -> Kernel:
    """The kernel for the device and the head sizes of `query` and `value`."""
    kernel = CudaFlash() if query.is_cuda else CpuFlash()
    return kernel if query.shape[3] == value.shape[3] else Padded(kernel)
