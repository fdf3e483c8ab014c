"""pretrain_gpt.py that measures each of its training steps from outside.

Every rank appends to the file MEASURED.RANK, one line a step: how many elements it receives in gathers and sends in
reductions, as PyTorch's collectives get them, and the largest resident memory of its process, in bytes; and a line when
it writes a checkpoint: the bytes of the weights that are there.
"""

import ctypes
import json
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pretrain_gpt  # before Megatron

# isort: split
import torch
from megatron.core import dist_checkpointing
from megatron.training import training
from torch.utils._python_dispatch import TorchDispatchMode

# The place of the whole tensor, and of the share, among the arguments of a collective.
PLACES = {"_allgather_base_": ("gathered", 0, 1), "_reduce_scatter_base_": ("reduced", 1, 0)}
PLACES["allgather_into_tensor_coalesced_"] = PLACES["_allgather_base_"]
PLACES["reduce_scatter_tensor_coalesced_"] = PLACES["_reduce_scatter_base_"]
M_MMAP_THRESHOLD = -3
chunks = []  # of the model, once it trains


class Elements(TorchDispatchMode):
    """Elements that collectives of shares move to, or from, the other ranks of their group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and (name := func._schema.name.partition("::")[2]) in PLACES:
            kind, whole, share = PLACES[name]
            self.counts[kind] += size(args[whole]) - size(args[share])
        return func(*args, **(kwargs or {}))


def size(tensors) -> int:
    return tensors.numel() if isinstance(tensors, torch.Tensor) else sum(each.numel() for each in tensors)


def measured(step, forward_step_func, data_iterator, model, *args, **kwargs):
    chunks[:] = model
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    with Elements() as elements:
        result = step(forward_step_func, data_iterator, model, *args, **kwargs)
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    note({**elements.counts, "resident": peak})
    return result


def note(line: dict[str, int]) -> None:
    with open(f"{os.environ['MEASURED']}.{os.environ['RANK']}", "a") as file:
        print(json.dumps(line), file=file)


def saved(save, *args, **kwargs):
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    storages = {each.data_ptr(): each for each in (parameter.untyped_storage() for parameter in parameters)}
    note({"weights": sum(storage.nbytes() for storage in storages.values())})
    return save(*args, **kwargs)


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system
    training.train_step = partial(measured, training.train_step)
    dist_checkpointing.save = partial(saved, dist_checkpointing.save)
    pretrain_gpt.main(pretrain_gpt.gpt_config_from_args, {})
