"""Attention kernels, which compute causal attention of a segment to its whole prefix, and the choice of one."""

from .adapted import Padded, RunOnce, WithSink, on_parts
from .flash import CudaFlash
from .interface import AttentionRule, DocumentKernel, Gradients, Kernel, Saved
from .kernel_choice import KernelChoice
from .unfused import default_generator
