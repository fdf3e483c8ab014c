"""Which FlashAttention PyTorch's own operators run on: 2 is built in, 3 and 4 come with packages of their own."""

import logging
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.attention

from ...ranks import is_rank_0, warn_on_rank_0

_log = logging.getLogger(__name__)


class _Version(NamedTuple):
    """PyTorch's name of an implementation, the module it needs, how to get that, and GPUs by major capability."""

    implementation: str
    module: str
    package: str
    majors: tuple[int, ...]


_VERSIONS = {
    3: _Version("FA3", "flash_attn_interface", "FlashAttention-3 (the folder hopper of flash-attention)", (9,)),
    4: _Version("FA4", "flash_attn.cute", "the package flash-attn-4", (9, 10)),
}

# The fastest first, by the major compute capability: 9 is Hopper, 10 Blackwell. All others have 2 only.
_BEST = {9: (3, 4), 10: (4,)}


def best_version(version: int | None) -> int:
    """The one that `activate_flash_attention` is going to take."""
    usable = _usable(version)
    return usable[0] if usable else 2


def _usable(version: int | None) -> list[int]:
    if not _can_switch():
        return []
    major, _ = torch.cuda.get_device_capability()
    return [each for each in _candidates(version) if major in _VERSIONS[each].majors and is_installed(each)]


def _candidates(version: int | None) -> tuple[int, ...]:
    major, _ = torch.cuda.get_device_capability()
    return _BEST.get(major, ()) if version is None else (version,)


def activate_flash_attention(version: int | None) -> int:
    """Let PyTorch's operators run on FlashAttention 3 or 4 in the whole process; returns the version in use.

    `version` is Megatron's --flash-attention-version; None takes the fastest that is installed and made for the GPU.
    Reports on rank 0 which it is, and what to install for a faster one.
    """
    major, _ = torch.cuda.get_device_capability()
    candidates, usable = _candidates(version), _usable(version)
    if usable:
        torch.nn.attention.activate_flash_attention_impl(_VERSIONS[usable[0]].implementation)
    used = usable[0] if usable else 2
    if is_rank_0():
        _log.info("attention of segments runs on FlashAttention-%d", used)
    if candidates and used != candidates[0]:
        better = _VERSIONS[candidates[0]]
        why = "it is made for other GPUs"
        if major in better.majors:
            missing = better.package if _can_switch() else "a PyTorch that can switch to it, such as 2.13"
            why = f"install {missing}, or take Transformer Engine's by --attention-backend fused"
        warn_on_rank_0(_log, f"attention runs on FlashAttention-{used} instead of {candidates[0]}: {why}")
    return used


def _can_switch() -> bool:
    """Whether PyTorch's operators run on versions other than the built-in one; those of 2.6 do not."""
    return hasattr(torch.nn.attention, "activate_flash_attention_impl")


def is_installed(version: int) -> bool:
    """Whether the module of FlashAttention 3 or 4 can be imported."""
    try:
        return find_spec(_VERSIONS[version].module) is not None
    except ImportError:  # of the package around it
        return False
