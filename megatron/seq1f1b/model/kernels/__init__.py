"""Attention kernels, which compute causal attention of a segment to its whole prefix, and the choice of one."""

from .flash import CudaFlash
from .interface import AttentionRule, DocumentKernel, Gradients, Kernel, Saved
from .kernel_choice import KernelChoice
from .padded import Padded
from .parts import on_parts
from .run_once import RunOnce
from .unfused import default_generator
from .with_sink import WithSink
