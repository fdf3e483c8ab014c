"""Questions at the edges of what there is to choose from: every answer is sensible, or a sentence."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.commands import plan as command
from megatron.seq1f1b.planning.planner import Search, plan, way_out
from unit_tests.planning.planner.question import MODEL, small


def layout(found) -> tuple[int, int, int, int]:
    setup = found.candidate.setup
    return setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel


def test_one_device_has_nothing_to_divide():
    found = plan(small(num_devices=1))
    assert found and all(layout(each) == (1, 1, 1, 1) for each in found)
    # Recomputation takes longer, so it comes after the same without.
    kinds = [each.candidate.setup.recompute for each in found]
    assert kinds[0] == "none"


def test_a_length_that_nothing_divides_stays_whole_on_its_ranks():
    found = plan(small(sequence_length=4099))
    assert found
    for each in found:
        setup = each.candidate.setup
        assert (setup.tensor_parallel, setup.context_parallel) == (1, 1) and sum(setup.segments) == 4099


def test_a_length_below_the_number_of_segments_is_not_cut():
    found = plan(small(sequence_length=2))
    assert found and all(len(each.candidate.setup.segments) <= 2 for each in found)


def test_a_batch_of_one_sequence_has_no_replicas():
    found = plan(small(global_batch_size=1))
    assert found and all(layout(each)[3] == 1 for each in found)
    assert all(each.candidate.setup.num_microbatches == 1 for each in found)


def test_a_batch_that_few_divide():
    assert {layout(each)[3] for each in plan(small(num_devices=6, global_batch_size=3), best=20)} <= {1, 3}


def test_a_single_layer_has_no_pipeline():
    found = plan(small(model=replace(MODEL, num_layers=1)))
    assert found and all(layout(each)[2] == 1 for each in found)


def test_an_odd_number_of_heads_is_not_divided_by_tensors():
    found = plan(small(model=replace(MODEL, num_heads=7)))
    assert found and all(layout(each)[0] == 1 for each in found)


def test_no_memory_is_not_all_memory():
    question = small(memory_gib=0)
    assert plan(question) == []
    assert "no configuration fits 0 GiB" in str(way_out(question))


@pytest.mark.parametrize("amount", ["0", "-1", "nan", "inf", "much"])
def test_an_amount_of_memory_is_a_number_above_0(amount, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--model", "2.7b", "--gpus", "8", f"--device-memory={amount}"])
    assert ended.value.code == 2
    assert f"--device-memory: '{amount}' is not a number above 0" in capsys.readouterr().err


def test_auto_is_shown_where_it_is_faster_and_only_there():
    question = small(families=("1f1b", "auto"), memory_gib=3, chunks=(1,))
    found = Search(question).best(12, accept=lambda candidate: candidate.setup.pipeline_parallel > 1)

    def by_auto(plan):
        return replace(plan.candidate, setup=replace(plan.candidate.setup, family="auto"))

    named = {by_auto(each): each.prediction.seconds for each in found if each.candidate.setup.family == "1f1b"}
    automatic = [each for each in found if each.candidate.setup.family == "auto"]
    assert automatic and all(each.prediction.seconds < named.get(each.candidate, 1.0) for each in automatic)


def test_nothing_idles_less_than_never():
    assert all(each.prediction.bubble >= 0 for each in plan(small(num_devices=1, global_batch_size=8), best=20))
