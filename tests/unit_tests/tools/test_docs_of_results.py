"""The pages that tools write say what the tools print, in a part that takes seconds."""

import csv
from collections import Counter
from pathlib import Path

from paper import headlines, megatron_tables, terapipe_tables
from paper_tables import GOALS, as_csv
from results import SECTIONS, sections_of

DOCS = Path(__file__).parents[3] / "docs"


def test_published_tables():
    rows = [*megatron_tables.recomputation(), *terapipe_tables.latencies()]
    printed, written = as_csv(rows), (DOCS / "paper_tables.csv").read_text(encoding="utf-8")
    assert set(printed.splitlines()) <= set(written.splitlines())


def test_the_summary_is_of_the_rows_beside_it():
    page = (DOCS / "paper_tables.md").read_text(encoding="utf-8")
    with (DOCS / "paper_tables.csv").open(encoding="utf-8", newline="") as file:
        counts = Counter(row["table"] for row in csv.DictReader(file) if row["error"])
    assert set(counts) == set(GOALS)
    assert all(f"| {table} | {count} |" in page for table, count in counts.items())


def test_the_claim_of_seq1f1b():
    written = (DOCS / "results.md").read_text(encoding="utf-8")
    assert all(line in written for line in headlines.thirty_billion_at_64k())


def test_the_page_of_results_has_a_part_for_each_section():
    *_, gains = written = sections_of((DOCS / "results.md").read_text(encoding="utf-8"))
    assert len(written) == len(SECTIONS) and gains == SECTIONS["gains"](None)


def test_sections_end_where_the_next_begins():
    assert sections_of("# A\n\ntext\n\n## B\n\n### C\nb\n\n## D\nd\n") == ["## B\n\n### C\nb\n", "## D\nd\n"]
