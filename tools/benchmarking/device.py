"""Where a rank of a benchmark runs. To be imported first: it makes a machine without a GPU fit for Megatron."""

import argparse
import ctypes
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.seq1f1b.platform import cpu, stand_ins  # noqa: E402
from megatron.seq1f1b.process.patches import Patch, patched  # noqa: E402

if not torch.cuda.is_available():
    cpu.activate()

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4

SIZES = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512}


def parser_of(doc: str, **sizes: int) -> argparse.ArgumentParser:
    """With flags for the sizes of a GPT, which are `sizes` or else `SIZES` by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (SIZES | sizes).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--repeats", type=int, default=5)
    parser.set_defaults(hybrid_layer_pattern=None)
    return parser


def start() -> None:
    """Join the other ranks, or run alone without torchrun, each with a GPU of its own on a machine that has GPUs."""
    use_own_gpu()
    if not torch.cuda.is_available():
        keep_freed_memory()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**alone)


def keep_freed_memory() -> None:
    """Let the process keep what it frees, as the allocator of a GPU does. Pages that each step takes anew from the
    system make forwards before the first backward slower than those after it."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    reason = "hands freed pages back before every step"
    patched([Patch("torch.cuda.reset_peak_memory_stats", stand_ins.nothing, reason)])


def use_own_gpu() -> None:
    """Make the GPU of this rank (``LOCAL_RANK``) the current one, on a machine that has GPUs.

    Raises SystemExit with a sentence if there are more ranks on this machine than GPUs.
    """
    if not torch.cuda.is_available():
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise SystemExit(
            f"error: local rank {local_rank} has no GPU, {count} are visible: use --nproc-per-node {count} or less."
        )
    torch.cuda.set_device(local_rank)
