"""Attention kernels: what a kernel must offer, and which one serves a tensor."""

from .choice import KernelChoice
from .interface import CumulativeLengths, Gradients, Kernel, PackedKernel

__all__ = ["CumulativeLengths", "Gradients", "Kernel", "KernelChoice", "PackedKernel"]
