"""The facts about a run and about what is installed that the table of what is unsupported names."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any


def packs_documents(settings: Mapping[str, Any]) -> bool:
    """Whether sequences hold several documents that must not see one another."""
    names = ("reset_attention_mask", "sft", "dataloader_inter_document_masking", "keep_documents_apart")
    return any(settings.get(name) for name in names)


def is_on_gpu(settings: Mapping[str, Any]) -> bool:
    """gloo serves GPUs, too."""
    return settings.get("distributed_backend") == "nccl" or settings.get("device") == "cuda"


def is_on_gpu_here(settings: Mapping[str, Any]) -> bool:
    """False in a rehearsal, since its packages are those of the cluster."""
    return is_on_gpu(settings) and not settings.get("dry_run")


def is_on_hopper_here(settings: Mapping[str, Any]) -> bool:
    import torch

    return is_on_gpu_here(settings) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


def installed(*distributions: str) -> tuple[int, ...] | None:
    """Up to three numbers of the version of the first distribution that is installed; None if none is."""
    for name in distributions:
        try:
            return tuple(map(int, re.findall(r"\d+", version(name))[:3]))
        except PackageNotFoundError:
            continue
    return None
