"""Attention kernels: their interface, and the choice of one for a layer.

A kernel computes causal attention of a segment to its whole prefix by one `AttentionRule`. `KernelChoice` finds one for
the rule, the device, the type and the head sizes. `WithSink` adds a sink to a kernel's softmax; `on_parts` confines a
kernel to the documents of packed sequences and to some of the queries of a segment; `RunOnce` skips its repeated
forward.
"""

from .adapted import RunOnce, WithSink
from .flash import CudaFlash
from .interface import AttentionRule, DocumentKernel, Gradients, Kernel, Saved
from .kernel_choice import KernelChoice
from .parts import on_parts
from .unfused import default_generator
