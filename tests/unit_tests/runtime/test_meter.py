"""The meter of every step, and the peak of its memory."""

import time

import pytest
import torch

from megatron.seq1f1b.runtime import StepMeter
from megatron.seq1f1b.runtime.meter import PeakMemory
from megatron.seq1f1b.schedule import parse_action

MIB = 2**20


def test_the_peak_counts_what_was_freed_and_not_what_was_before(memory_of_the_process):
    before = torch.ones(64 * MIB // 4)
    memory = PeakMemory(torch.device("cpu"))
    step = torch.ones(128 * MIB // 4)
    del step
    assert 120 * MIB < memory.peak() < 160 * MIB
    assert before.sum() > 0


def test_pages_freed_by_the_step_before_hide_nothing(memory_of_the_process):
    """Small tensors are freed into the heap of the process, which keeps the pages; the next step finds them there."""
    meter, device = StepMeter(), torch.device("cpu")
    for _ in range(2):
        with meter.step(device):
            step = [torch.ones(8192) for _ in range(2000)]
            kept = torch.ones(8)  # at the end of the heap
            del step
    assert meter.reading().peak_memory > 50 * MIB
    assert kept.sum() > 0


def test_a_step_is_busy_while_actions_run(memory_of_the_process):
    meter = StepMeter()
    assert meter.reading() is None
    for _ in range(2):  # the second forgets the first
        with meter.step(torch.device("cpu")):
            for action in ("0F0.0", "0B0.0"):
                with meter.span(parse_action(action)):
                    time.sleep(0.02)
            time.sleep(0.04)
    reading = meter.reading()
    assert 0.04 <= reading.busy < reading.duration
    assert reading.duration - reading.busy >= 0.04


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_events_are_recorded_again():
    meter, device = StepMeter(), torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(2):
        with meter.step(device), meter.span(parse_action("0F0.0")):
            matrix @ matrix
    torch.cuda.synchronize()
    reading = meter.reading()
    assert 0 < reading.busy <= reading.duration and reading.peak_memory >= matrix.nbytes
