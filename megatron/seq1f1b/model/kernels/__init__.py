"""Attention kernels: what a kernel must offer, and which one serves a tensor."""

from torch import Tensor

from .cpu import CpuFlash
from .cuda import CudaFlash
from .interface import Gradients, Kernel

__all__ = ["Gradients", "Kernel", "kernel_for"]


def kernel_for(query: Tensor) -> Kernel:
    """The kernel for the device of `query`."""
    return CudaFlash() if query.is_cuda else CpuFlash()
