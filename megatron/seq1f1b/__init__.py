"""Sequence-level pipeline parallelism for Megatron: schedules as data, run beside the released megatron-core.

A training script calls `install()` before it imports Megatron, `add_arguments` as its extra arguments provider and
`validate` on what was parsed.
"""

from .install import install

__all__ = ["install"]
