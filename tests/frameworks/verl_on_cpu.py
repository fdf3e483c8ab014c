"""What verl's processes import on a CPU, by its own hook: VERL_USE_EXTERNAL_MODULES=frameworks.verl_on_cpu.

A platform of verl's (VERL_PLATFORM=cpu) whose ranks talk over gloo, this package's redirects, and what verl_engine.py
changes in mbridge and in Megatron's attention.
"""

import os

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA

from megatron.seq1f1b.platform import cpu
from megatron.seq1f1b.process.patches import patched

cpu.activate()  # before Megatron is imported


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformCUDA):
    def communication_backend_name(self) -> str:
        return "gloo"


def prepare() -> None:
    """In a worker, before its engine is made."""
    from frameworks.own_attention import OWN_ATTENTION
    from frameworks.verl_engine import build_local_layers

    build_local_layers()
    torch.cuda.mem_get_info = lambda device=None: (0, 0)
    if "SEQ1F1B" not in os.environ:
        patched([OWN_ATTENTION])
