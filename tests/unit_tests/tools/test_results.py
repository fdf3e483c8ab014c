"""What docs/results.md is made of."""

from dataclasses import replace

from megatron.seq1f1b.planning.planner import Training, candidates
from paper import headlines, layered
from unit_tests.planning.planner.question import MODEL, small


def test_30b_fits_by_segments_only():
    rows = list(headlines.thirty_billion_at_64k())[2:]
    verdicts = {row.split(" | ")[0].strip("| "): row for row in rows}
    assert all("out of memory" in verdicts[method] for method in ("1F1B", "1F1B-I"))
    assert all("tokens/s" in verdicts[method] for method in ("Seq1F1B", "Seq1F1B-I of 2 chunks"))


def test_the_derivation_sets_the_methods_side_by_side():
    found = []
    for network in layered.networks():
        for method, days in (("1F1B", 8.0), ("interleaved 1F1B", 6.0), ("modular pipeline", 4.0)):
            is_its = layered.METHODS[method]
            question = small(model=replace(MODEL, num_layers=8), families=("1f1b", "breadth-first"), segments=(1,))
            candidate = next(each for each in candidates(question) if is_its(each.setup))
            training = Training(candidate, days * 86400 / 100, 20.0, 100.0)
            found += [layered.Case(network, method, 16384, training), layered.Case(network, method, 65536, None)]
    lines = layered.markdown(found)
    assert len(lines) == 2 + len(found) and sum("does not fit" in line for line in lines) == 6
    assert "| modular pipeline | 4 | 0.50 |" in "\n".join(lines)
    assert "8 days with 1F1B, 6 interleaved and 4 with the modular pipeline, 0.50 of 1F1B" in layered.findings(found)[0]


def test_sharded_state_is_a_fraction_of_the_whole():
    candidate = next(each for each in candidates(small()) if each.setup.data_parallel == 4)
    setup, training = candidate.setup, Training(candidate, 1.0, 20.0, 100.0)
    whole = setup.stage_parameters(0) * 18 / 2**30
    assert whole / 4 < layered.sharded_gib(training) < whole
