"""Peak memory of a step on the CPU."""

import torch

from megatron.seq1f1b.runtime.memory import PeakMemory

MIB = 2**20


def test_peak_counts_what_was_freed_again_and_not_what_was_there_before():
    before = torch.ones(64 * MIB // 4)
    memory = PeakMemory(torch.device("cpu"))
    step = torch.ones(128 * MIB // 4)
    del step
    assert 120 * MIB < memory.peak() < 160 * MIB
    assert before.sum() > 0
