"""`seq1f1b profile` on this machine (that it finds the right constants: unit_tests/tools/test_profile.py)."""

import sys
from pathlib import Path

import pytest

from megatron.seq1f1b.planning.costs.machine import read_machine
from support.launch import torchrun


@pytest.mark.exhaustive
def test_two_ranks_measure_their_device_and_their_link(tmp_path):
    output, command = tmp_path / "mine.toml", Path(sys.executable).with_name("seq1f1b")
    job = torchrun(command, 2, ["profile", "--output", output], timeout=600).check()
    machine = read_machine(output)
    assert output.read_text() in job.log and job.log.count("written. Predict with it") == 1
    assert 0 < machine.device.flash_forward < 2 and 0 < machine.device.matmul_efficiency < 2
    assert machine.node.bandwidth != read_machine("cpu").node.bandwidth
