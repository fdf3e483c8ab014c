"""The name of the attention kernel that a configuration leads to, for the block that a launch prints at its start.

Tested in launch/test_summary.py by test_the_block_tells_what_runs_beside_megatrons_own.
"""

import torch

from ..arguments import PipelineConfig, is_on_cpu
from ..model.kernels import AttentionRule, KernelChoice


def attention_kernel(config: PipelineConfig) -> str:
    """The name of the kernel; Megatron's own if sequences stay whole and no attention is kept."""
    if config.num_segments == 1 and not config.flags.recompute_keeps_attention:
        return "as with Megatron's own schedules"
    settings = config.run.settings
    dropout = settings.get("attention_dropout") or 0.0
    choice = KernelChoice(
        backend=getattr(settings.get("attention_backend"), "name", "auto"),
        flash_attention_version=settings.get("flash_attention_version"),
        has_dropout=dropout > 0,
    )
    dtype = torch.float32
    if settings.get("bf16"):
        dtype = torch.bfloat16
    elif settings.get("fp16"):
        dtype = torch.float16
    size = settings.get("kv_channels") or 1
    return choice.name(
        rule=AttentionRule(scale=1.0, dropout=dropout),
        is_cuda=not is_on_cpu(config.flags) and torch.cuda.is_available(),
        dtype=dtype,
        size=size,
        value_size=settings.get("v_head_dim") or size,
    )
