"""Whether all ranks are about to do the same thing."""

from collections import Counter

import torch.distributed as dist


def check_agreement(plan: str) -> None:
    """Compare the description of a plan over all ranks of the world, by one small all-gather.

    Raises ValueError on all ranks if any differs, which would otherwise end in a hang or a message of the wrong size.
    """
    plans = [None] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    usual, _ = Counter(plans).most_common(1)[0]
    others = [f"rank {rank} has {other}" for rank, other in enumerate(plans) if other != usual]
    if others:
        raise ValueError(
            f"the ranks disagree on what to run: {'; '.join(others)}; the other ranks have {usual}. Start all ranks "
            "with the same flags and files"
        )
