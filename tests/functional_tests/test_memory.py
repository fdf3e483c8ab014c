"""What Seq1F1B saves: a step holds at its peak what the formula gives (see memory_worker.py)."""

from pathlib import Path

WORKER = Path(__file__).parent / "workers" / "memory_worker.py"


def test_the_peak_is_units_in_flight_and_their_keys_and_values(launch):
    job = launch(4, script=WORKER, timeout=200).check()
    assert job.log.count("promised") == 4 * 5
