"""Attention kernels: what a kernel must offer, and which one serves a tensor."""

from .choice import KernelChoice
from .interface import Gradients, Kernel, PackedKernel, Packing

__all__ = ["Gradients", "Kernel", "KernelChoice", "PackedKernel", "Packing"]
