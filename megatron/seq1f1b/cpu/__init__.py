"""Megatron on a machine without a GPU: CPU tensors, gloo, and nothing else changed.

Nothing here is active until :func:`activate` is called. What it then redirects, and why, is
written in one table, :data:`megatron.seq1f1b.cpu.redirects.REDIRECTS`.
"""

from megatron.seq1f1b.cpu.device import wanted
from megatron.seq1f1b.cpu.redirects import activate, is_active

__all__ = ["activate", "is_active", "wanted"]
