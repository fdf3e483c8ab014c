"""Caches of keys and values, and kept attention, go to the memory of the host with the unit of the last segment."""

from contextlib import nullcontext

import pytest
import torch

from megatron.seq1f1b.model import host_memory
from support.segments import Attended, attention, inputs, of_lengths

LENGTHS, SIZE = (60, 40, 50), 8
HEADS = 2, 4, 2, SIZE, SIZE  # sequences, heads, KV heads, size of keys and of values
OF_TOKEN, LOG_SUM_EXP = 2 * 2 * 2 * SIZE * 8, 2 * 4 * 8  # bytes, in fp64


class Moved(Attended):
    """Its last segment moves."""

    @property
    def memory(self):
        return self.layer.segment_context.host_memory

    def forward(self) -> None:
        with self.memory.keeping("unit"):
            super().forward()
        self.memory.offload("unit", nullcontext())

    def backward(self) -> None:
        self.memory.reload("unit", nullcontext())
        self.memory.wait("unit")
        super().backward()


# Tokens that are kept: all, or, where they are computed again, a window of each segment.
@pytest.mark.parametrize("window, kept", [(None, (150, 150)), (20, (150, 60))], ids=["prefix", "window"])
@pytest.mark.parametrize("recompute, keeps", [(False, False), (True, False), (True, True)], ids=["", "again", "kept"])
def test_a_cache_leaves_and_comes_back(monkeypatch, window, kept, recompute, keeps):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(host_memory, "SMALLEST", 1)
    *tensors, grad = inputs(sum(LENGTHS), HEADS)
    found = []
    for kind in (Attended, Moved):
        attended = kind(attention(SIZE, window=window), tensors, grad, of_lengths(LENGTHS), recompute)
        attended.layer.segment_context.kept_attention = {} if keeps else None
        attended.forward()
        if kind is Moved:
            of_kernels = 0 if recompute and not keeps else LOG_SUM_EXP * sum(LENGTHS)
            assert attended.memory.num_bytes == OF_TOKEN * kept[recompute] + of_kernels
        attended.backward()
        found.append([torch.cat(attended.outputs), *(x.grad for part in attended.parts for x in part)])
    assert all(map(torch.equal, *found))
