"""The memory that Seq1F1B is for: what a step holds at its peak is what the formula says (see memory_worker.py)."""

from pathlib import Path

WORKER = Path(__file__).with_name("memory_worker.py")


def test_peak_is_that_of_the_units_in_flight_and_their_keys_and_values(launch):
    job = launch(4, script=WORKER, timeout=200).check()
    assert job.log.count("promised") == 4 * 5
