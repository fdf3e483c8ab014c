"""The meter of every step."""

import time

import pytest
import torch

from megatron.seq1f1b.runtime import StepMeter
from megatron.seq1f1b.schedule import parse_action


def test_a_step_is_busy_while_actions_run():
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
