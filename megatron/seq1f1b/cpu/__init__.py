"""Megatron on a machine without a GPU: CPU tensors, gloo, and nothing else changed.

Nothing here is active until :func:`activate` is called. What it then redirects, and why, is
written in one table, ``REDIRECTS`` in :mod:`megatron.seq1f1b.cpu.redirects`.
"""

from collections.abc import Sequence

from megatron.seq1f1b.cpu.device import wanted

__all__ = ["activate", "wanted", "wants_transformer_engine"]


def wants_transformer_engine(argv: Sequence[str]) -> bool:
    """Whether the flags select Transformer Engine's layers, and its Python is installed to run them on a CPU."""
    from megatron.seq1f1b.cpu import transformer_engine

    return transformer_engine.is_wanted(argv)


def activate(with_transformer_engine: bool = False) -> None:
    """Make Megatron run on CPU tensors and gloo, from now on, in this process.

    Best called before ``megatron.core`` is imported, whose fused functions are compiled otherwise.
    Calling it again does nothing. Transformer Engine's layers can run on CPU tensors too, see
    :mod:`megatron.seq1f1b.cpu.transformer_engine`.
    """
    # Here, since it imports torch, which takes seconds: tools that only simulate do without.
    from megatron.seq1f1b.cpu import redirects

    redirects.apply(with_transformer_engine)
