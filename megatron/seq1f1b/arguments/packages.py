"""Whether the packages with GPU kernels that a run needs are installed."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

Version = tuple[int, ...]


def lacks_transformer_engine(settings: Mapping[str, Any]) -> bool:
    """--attention-backend fused without Transformer Engine 2.20 or later."""
    return _is_fused(settings) and _is_on_gpu_here(settings) and (_version("transformer-engine") or (0,)) < (2, 20)


def fused_attention_has_no_backend(settings: Mapping[str, Any]) -> bool:
    """Transformer Engine's fused attention has no dropout within documents or windows, which cuDNN masks."""
    masks = bool(settings.get("window_size")) or packs_documents(settings)
    return _is_fused(settings) and _is_on_gpu(settings) and bool(settings.get("attention_dropout")) and masks


def lacks_mamba(settings: Mapping[str, Any]) -> bool:
    """A GPU without the kernels of Mamba layers."""
    return _is_on_gpu_here(settings) and (_is_missing("mamba_ssm") or _is_missing("causal_conv1d"))


def delta_nets_are_wrong(settings: Mapping[str, Any]) -> bool:
    """The installed flash-linear-attention gives gated delta nets wrong gradients on this GPU.

    On Hopper, Triton 3.4.0 to 3.7.0 miscompiles their backward. flash-linear-attention 0.5.0 and later refuses to run
    there.
    """
    if not _is_on_gpu_here(settings) or not _is_hopper():
        return False
    fla, triton = _version("flash-linear-attention") or _version("fla-core"), _version("triton")
    return fla is not None and fla < (0, 5) and triton is not None and (3, 4) <= triton < (3, 7, 1)


def packs_documents(settings: Mapping[str, Any]) -> bool:
    """Whether sequences hold several documents that must not see one another."""
    names = ("reset_attention_mask", "sft", "dataloader_inter_document_masking", "keep_documents_apart")
    return any(settings.get(name) for name in names)


def _is_fused(settings: Mapping[str, Any]) -> bool:
    return getattr(settings.get("attention_backend"), "name", None) == "fused"


def _is_on_gpu(settings: Mapping[str, Any]) -> bool:
    """gloo serves GPUs, too."""
    return settings.get("distributed_backend") == "nccl" or settings.get("device") == "cuda"


def _is_on_gpu_here(settings: Mapping[str, Any]) -> bool:
    """False in a rehearsal, since its packages are those of the cluster."""
    return _is_on_gpu(settings) and not settings.get("dry_run")


def _is_hopper() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ImportError:  # of the package around it
        return True


def _version(distribution: str) -> Version | None:
    """Up to three numbers; None if the distribution is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", version(distribution))[:3]))
    except PackageNotFoundError:
        return None
