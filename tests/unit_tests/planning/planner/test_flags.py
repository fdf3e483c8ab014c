"""The flags of a plan mean what was planned."""

import shlex
from dataclasses import replace

import pytest

from megatron.seq1f1b.commands.candidate_flags import decided_flags, model_flags
from megatron.seq1f1b.commands.launch_flags import as_given, model_of, read_launch, undecided
from megatron.seq1f1b.planning.costs import Experts
from megatron.seq1f1b.planning.planner import PRESETS, candidates, preset
from megatron.seq1f1b.planning.planner.space import Candidate
from unit_tests.planning.planner.question import MODEL, small


def words_of(candidate: Candidate) -> list[str]:
    flags = [*model_flags(candidate.setup.model, candidate.setup.sequence_length), *decided_flags(candidate)]
    return shlex.split(" ".join(flags))


def sample() -> list[Candidate]:
    return list(candidates(small()))[::5]


def test_a_plan_read_back_is_the_same():
    for candidate in sample():
        launch = read_launch([*words_of(candidate), "--vocab-size", "32768"])
        assert model_of(launch) == candidate.setup.model
        assert as_given(launch, small()) == candidate


def test_experts_and_their_parallel_size_are_read_back():
    experts = Experts(8, 2, 512, shared_ffn_hidden_size=256)
    question = small(model=replace(MODEL, experts=experts, expert_layers=(1, 2, 3, 4, 5)), chunks=(1,), segments=(1, 4))
    found = list(candidates(question))
    assert {each.setup.expert_parallel for each in found} == {1, 2, 4}
    for candidate in found[::40]:
        launch = read_launch([*words_of(candidate), "--vocab-size", "32768"])
        assert model_of(launch) == candidate.setup.model
        assert as_given(launch, question) == candidate


def test_segments_of_context_parallel_ranks_can_be_halved():
    cut = [
        each.setup for each in candidates(small()) if each.setup.context_parallel > 1 and len(each.setup.segments) > 1
    ]
    assert cut
    for setup in cut:
        assert all(length % (2 * setup.context_parallel) == 0 for length in setup.segments)


@pytest.mark.parametrize("words", ["--multi-latent-attention", "--window-size 128,0", "--mtp-num-layers 1"])
def test_what_has_no_cost_is_a_sentence(words):
    launch = read_launch(["--num-layers", "6", "--hidden-size", "64", "--num-attention-heads", "4", *words.split()])
    with pytest.raises(ValueError, match="has no cost in the planner"):
        model_of(launch)


def test_other_flags_of_a_launch_come_back_unchanged():
    launch = "--num-layers 6 --tensor-model-parallel-size 2 --lr 6e-5 --data-path a b --sequence-parallel --bf16"
    assert undecided(shlex.split(launch)) == ["--num-layers 6", "--lr 6e-5", "--data-path a b", "--bf16"]


def test_a_launch_without_parallel_sizes_is_no_configuration():
    assert as_given(read_launch(["--num-layers", "6"]), small()) is None


@pytest.mark.parametrize(
    "words", ["--tensor-model-parallel-size 3", "--pipeline-model-parallel-size 4 --micro-batch-size 3"]
)
def test_a_launch_that_does_not_divide_is_a_sentence(words):
    with pytest.raises(ValueError, match="do not divide --gpus 4"):
        as_given(read_launch(words.split()), small())


def test_the_launchers_have_the_same_presets():
    assert preset("13b").hidden_size == 5120
    with pytest.raises(ValueError, match="model=12b is unknown; take 2.7b, "):
        preset("12b")
    assert all(shape.head_dim in (80, 96, 128, 160) for shape in PRESETS.values())
