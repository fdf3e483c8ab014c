"""The pages that tools write say what the tools print, in a part that takes seconds."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

import memory_by_use
from megatron.seq1f1b.commands.train_time import Training
from megatron.seq1f1b.costs import step_memory as memory
from paper import allocator, headlines, layered, megatron_tables
from paper_tables import all_rows, as_csv, markdown
from results import SECTIONS, sections_of
from unit_tests.planner.question import MODEL, candidates, small

DOCS = Path(__file__).parents[3] / "docs"
PUBLISHED = DOCS / "paper_tables.md"


def test_published_tables():
    published = set(PUBLISHED.with_suffix(".csv").read_text().splitlines())
    assert set(as_csv([*megatron_tables.recomputation()]).splitlines()) <= published


@pytest.mark.exhaustive  # half a minute of one core
def test_the_pages_of_published_tables_are_what_is_predicted():
    """So their errors are those of today."""
    rows, page = all_rows(), PUBLISHED.read_text(encoding="utf-8")
    assert as_csv(rows) == PUBLISHED.with_suffix(".csv").read_text(encoding="utf-8")
    assert f"\n{markdown(rows)}" in page
    verdicts = page.split("\nOut of memory where it was: not for ")[1].split("\n\n")[0]
    assert verdicts.count("Llama-65B") == 2 and verdicts.endswith("\nOrder of the methods: right in every group.")


def test_what_fills_a_gpu(monkeypatch):
    monkeypatch.setattr(memory_by_use, "LENGTHS", {32768: 16})
    page = (DOCS / "long-context.md").read_text(encoding="utf-8")
    assert all(f"| {' | '.join(row)} |\n" in page for row in memory_by_use.rows())


def test_what_pytorchs_allocator_holds_back():
    """By the constants that are fitted to its counters, also on runs that they are not fitted to."""
    rows = allocator.measured()
    used = memory.HELD_BACK, memory._FOR_EACH_DOUBLING, memory.HELD_BACK_OF_LOGITS
    assert allocator.fit(rows) == pytest.approx(used, abs=0.005)
    for log in {row.log for row in rows}:
        constants = allocator.fit([row for row in rows if row.log != log])
        assert max(abs(allocator.error(row, constants)) for row in rows if row.log == log) < 0.15


def test_30b_fits_by_segments_only_and_the_page_has_it():
    written, lines = (DOCS / "results.md").read_text(encoding="utf-8"), [*headlines.thirty_billion_at_64k()]
    assert all(line in written for line in lines)
    verdicts = {row.split(" | ")[0].strip("| "): row for row in lines[2:]}
    assert all("out of memory" in verdicts[method] for method in ("1F1B", "1F1B-I"))
    assert all("tokens/s" in verdicts[method] for method in ("Seq1F1B", "Seq1F1B-I of 2 chunks"))


def test_the_pages_name_the_same_ranks_that_do_not_fit():
    rehearsed = re.findall(r"ranks (0 to \d) do not fit", (DOCS / "rehearsal.md").read_text(encoding="utf-8"))
    named = f"1F1B exceeds 80 GiB on pipeline ranks {rehearsed[0]}, its interleaved form on {rehearsed[1]}, Seq1F1B"
    assert len(rehearsed) == 2 and named in (DOCS / "results.md").read_text(encoding="utf-8")


def test_the_page_of_results_has_a_part_for_each_section():
    *_, gains = written = sections_of((DOCS / "results.md").read_text(encoding="utf-8"))
    assert len(written) == len(SECTIONS) and gains == SECTIONS["gains"](None)
    assert sections_of("# A\n\ntext\n\n## B\n\n### C\nb\n\n## D\nd\n") == ["## B\n\n### C\nb\n", "## D\nd\n"]


def test_the_derivation_sets_the_methods_side_by_side():
    found = []
    model, families = replace(MODEL, num_layers=24, vocab_size=1024), ("1f1b", "breadth-first")
    days = dict(zip(layered.METHODS, (8.0, 6.0, 5.0, 4.0), strict=True))
    for network, (method, is_its) in product(layered.networks(), layered.METHODS.items()):
        partitions = {"chunks": (1, 6), "partitions_state": method == layered.PARTITIONED}
        found_by = candidates(small(model=model, families=families, segments=(1,), **partitions))
        of_two = (each for each in found_by if each.setup.pipeline_parallel == each.setup.data_parallel == 2)
        candidate = next(each for each in of_two if is_its(each.setup))
        training = Training(days[method], SimpleNamespace(candidate=candidate, memory_gib=20.0))
        found += [layered.Case(network, method, 16384, training), layered.Case(network, method, 65536, None)]
    lines = layered.markdown(found)
    assert len(lines) == 2 + len(found) and sum("does not fit" in line for line in lines) == 8
    assert "| modular pipeline, state partitioned | 4 | 0.50 |" in "\n".join(lines)
    expected = "8 days with 1F1B, 6 interleaved, 5 with the modular pipeline and 4 with its state partitioned, 0.62 and"
    assert expected in layered.findings(found)[0]
    state = {line.split(" | ")[2]: float(line.split(" | ")[9]) for line in lines[2:] if "does not fit" not in line}
    assert state[layered.PARTITIONED] < state["modular pipeline"] == state["interleaved 1F1B"]


def test_a_slower_network_than_the_slowest_takes_a_tenth_longer():
    _, machine = layered.networks().popitem()
    setup = next(each.setup for each in candidates(small()) if each.setup.data_parallel == 4)
    assert 0 < layered.slowest_network(setup, replace(machine, devices_per_node=1)) < machine.network.bandwidth / 1e9
