"""What counts as the time of other programs."""

import os

import pytest

from benchmarking.other_programs import Clocks, busy_seconds, share_of_others


def test_processors_run_programs_and_the_kernel_for_them():
    ticks = os.sysconf("SC_CLK_TCK")
    of_all = f"cpu  {3 * ticks} {2 * ticks} {ticks} 900 800 {ticks} {2 * ticks} 500 0 0"
    text = f"{of_all}\ncpu0 1 1 1 1 1 1 1 1 0 0\nintr 5\n"
    assert busy_seconds(text) == 9


def test_what_ranks_do_not_take_is_of_others():
    before = Clocks(wall=10.0, machine=100.0, ranks=50.0)
    assert share_of_others(before, Clocks(20.0, 115.0, 64.0), num_processors=2) == pytest.approx(1 / 20)
    assert share_of_others(before, Clocks(20.0, 115.0, 65.5), num_processors=2) == 0  # clocks of ranks are finer
