"""Where a rank of a benchmark runs."""

import os

import torch


def use_own_gpu() -> None:
    """Make the GPU of this rank (``LOCAL_RANK``) the current one, on a machine that has GPUs.

    Raises SystemExit with a sentence if there are more ranks on this machine than GPUs.
    """
    if not torch.cuda.is_available():
        return
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise SystemExit(
            f"error: local rank {local_rank} has no GPU, {count} are visible: use --nproc-per-node {count} or less."
        )
    torch.cuda.set_device(local_rank)
