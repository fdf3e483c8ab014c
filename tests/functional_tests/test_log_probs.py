"""Log-probabilities and entropies that a program takes in pieces, on segments: as from whole logits without us."""

import re

import pytest

from functional_tests.programs.log_probs import SETTINGS, run_programs


@pytest.mark.parametrize("reads_logits", [False, True], ids=["in pieces", "whole"])
def test_a_program_trains_as_with_whole_sequences(launch, reads_logits):
    launch.call(2, run_programs, timeout=600, reads_logits=reads_logits)
    lines = re.findall(r"^program ([^:]+): (.*)$", launch.last.log, re.MULTILINE)
    assert [name for name, _ in lines] == [*SETTINGS]
    assert all(line.startswith("equal, ") for _, line in lines), lines
    assert launch.last.log.count("in pieces") >= 4 * len(SETTINGS)
