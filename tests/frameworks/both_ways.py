"""Trainings by segments, and the same by Megatron's own schedule."""

from collections.abc import Callable
from typing import Any

from frameworks.equal_steps import Training
from frameworks.installed import installed
from frameworks.own_attention import OWN_ATTENTION
from megatron.seq1f1b.process.patches import patched


def both_ways[T: Training](name: str, ours: Callable[[], T], own: Callable[[], T], **options: Any) -> tuple[T, T]:
    """What `ours` gives with segments of 16 tokens and these `options` of `install`, and `own` without segments."""
    with installed(segment_tokens=16, **options):
        by_segments = ours()
    with patched([OWN_ATTENTION]):
        whole = own()
    for run in (by_segments, whole):
        print(name, run.losses, run.norms, run.peak_bytes, flush=True)
    return by_segments, whole
