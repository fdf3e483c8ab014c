"""What docs/results.md is made of."""

from paper import headlines
from results import gains_text


def test_30b_fits_by_segments_only():
    rows = list(headlines.thirty_billion_at_64k())[2:]
    verdicts = {row.split(" | ")[0].strip("| "): row for row in rows}
    assert all("out of memory" in verdicts[method] for method in ("1F1B", "1F1B-I"))
    assert all("tokens/s" in verdicts[method] for method in ("Seq1F1B", "Seq1F1B-I"))


def test_a_table_without_cases_has_its_head():
    assert "| model | GPUs | tokens |" in gains_text([])
