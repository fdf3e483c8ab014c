"""Questions at the edges of what there is to choose from: every answer is sensible, or a sentence."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.planning.planner.search import Search
from megatron.seq1f1b.planning.planner.way_out import way_out
from unit_tests.planning.planner.question import MODEL, small


def sizes(setup) -> tuple[int, int, int, int]:
    return setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel


# Changes to a question, and what holds of every set-up of its answer.
QUESTIONS = {
    "one device": ({"num_devices": 1}, lambda setup: sizes(setup) == (1, 1, 1, 1)),
    "a length that nothing divides": (
        {"sequence_length": 4099},
        lambda setup: sizes(setup)[:2] == (1, 1) and sum(setup.segments) == 4099,
    ),
    "fewer tokens than segments": ({"sequence_length": 2}, lambda setup: len(setup.segments) <= 2),
    "fewer sequences than devices": (
        {"global_batch_size": 1},
        lambda setup: setup.data_parallel == setup.num_microbatches == 1,
    ),
    "a batch that few divide": (
        {"num_devices": 6, "global_batch_size": 3},
        lambda setup: setup.data_parallel in (1, 3),
    ),
    "a single layer": ({"model": replace(MODEL, num_layers=1)}, lambda setup: setup.pipeline_parallel == 1),
    "an odd number of heads": ({"model": replace(MODEL, num_heads=7)}, lambda setup: setup.tensor_parallel == 1),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_unusual_question_has_a_sensible_answer(name):
    changes, holds = QUESTIONS[name]
    found = Search(small(**changes)).best(20)
    assert found and all(holds(each.candidate.setup) and each.prediction.bubble >= 0 for each in found)


def test_one_pipeline_rank_runs_segments_where_these_save_memory():
    """What is computed again of a wide layer is that of a segment, and few heads have keys and values to keep."""
    model = replace(MODEL, num_kv_heads=1, ffn_hidden_size=8192)
    alone = small(model=model, num_devices=1, sequence_length=131072, recomputes=("full",), memory_gib=70)
    whole, cut = (Search(replace(alone, segments=segments)).best(1)[0] for segments in ((1,), (8,)))
    assert len(cut.candidate.setup.segments) == 8 and cut.memory_gib < whole.memory_gib


def test_no_memory_is_not_all_memory():
    question = small(memory_gib=0)
    assert Search(question).best() == []
    assert "no configuration fits 0 GiB" in str(way_out(question))


def has_pipeline(candidate) -> bool:
    return candidate.setup.pipeline_parallel > 1


def test_auto_is_shown_where_it_is_faster_and_only_there():
    question = small(families=("1f1b", "auto"), memory_gib=3, chunks=(1,), accepts=has_pipeline)
    found = Search(question).best(12)

    def by_auto(plan):
        return replace(plan.candidate, setup=replace(plan.candidate.setup, family="auto"))

    named = {by_auto(each): each.prediction.seconds for each in found if each.candidate.setup.family == "1f1b"}
    automatic = [each for each in found if each.candidate.setup.family == "auto"]
    assert automatic and all(each.prediction.seconds < named.get(each.candidate, 1.0) for each in automatic)
