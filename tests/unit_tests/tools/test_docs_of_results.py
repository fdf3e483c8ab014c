"""The pages that tools write say what the tools print, in a part that takes seconds."""

from pathlib import Path

from paper import headlines, megatron_tables, terapipe_tables
from paper_tables import markdown
from results import SECTIONS, sections_of

DOCS = Path(__file__).parents[3] / "docs"


def rows_of(text: str, heading: str) -> list[str]:
    """The lines of the table under a heading."""
    part = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line for line in part.splitlines() if line.startswith("| ")]


def test_published_tables():
    rows = [*megatron_tables.recomputation(), *terapipe_tables.latencies()]
    printed, written = markdown(rows), (DOCS / "paper_tables.md").read_text(encoding="utf-8")
    for table in dict.fromkeys(row.table for row in rows):
        assert rows_of(printed, table) == rows_of(written, table)


def test_the_claim_of_seq1f1b():
    written = (DOCS / "results.md").read_text(encoding="utf-8")
    assert all(line in written for line in headlines.thirty_billion_at_64k())


def test_the_page_of_results_has_a_part_for_each_section():
    written = (DOCS / "results.md").read_text(encoding="utf-8")
    assert len(sections_of(written)) == len(SECTIONS)


def test_sections_end_where_the_next_begins():
    assert sections_of("# A\n\ntext\n\n## B\n\n### C\nb\n\n## D\nd\n") == ["## B\n\n### C\nb\n", "## D\nd\n"]
