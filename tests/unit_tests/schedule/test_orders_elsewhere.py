"""Our orders against those of Megatron, and under the rules of torch."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.schedule import FAMILIES, Action, Kind, Placement, Shape, build

from .strategies import fixed, shapes

megatron = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")


def megatron_order(ranks, rank, chunks, microbatches):
    """Warm-up forwards, pairs, cool-down, from Megatron's own table and count."""
    table = megatron.get_schedule_table(microbatches, chunks, ranks)
    stages = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    communicator = SimpleNamespace(pp_group=stages, virtual_pipeline_model_parallel_size=chunks)
    total, _, warm_up, _ = megatron.get_pp_rank_microbatches(microbatches, chunks, ranks, p2p_communicator=communicator)
    forward = [Action(Kind.F, chunk * ranks + rank, m, 0) for m, chunk in table]
    backward = [Action(Kind.B, (chunks - 1 - chunk) * ranks + rank, m, 0) for m, chunk in table]
    order = forward[:warm_up]
    for pair in range(total - warm_up):
        order += [forward[warm_up + pair], backward[pair]]
    return order + backward[total - warm_up :]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_interleaved_is_megatrons(ranks, chunks, groups):
    schedule = build("1f1b", Shape(Placement(ranks, chunks), ranks * groups))
    for rank in range(ranks):
        assert list(schedule.ranks[rank]) == megatron_order(ranks, rank, chunks, ranks * groups)


KINDS = {
    pipelining._ComputationType.FORWARD: Kind.F,
    pipelining._ComputationType.FULL_BACKWARD: Kind.B,
    pipelining._ComputationType.BACKWARD_INPUT: Kind.I,
    pipelining._ComputationType.BACKWARD_WEIGHT: Kind.W,
}


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes())
def test_torch_finds_every_schedule_valid(family, shape):
    """Torch has no segments: each unit is a micro-batch there."""
    schedule = build(family, shape)
    kinds = {kind: theirs for theirs, kind in KINDS.items()}
    theirs = {
        rank: [
            pipelining._Action(stage, kinds[kind], microbatch * shape.num_segments + segment)
            for kind, stage, microbatch, segment in actions
        ]
        for rank, actions in enumerate(schedule.ranks)
    }
    mapping = pipelining._validate_schedule(theirs, shape.num_ranks, shape.num_stages, shape.num_units)
    assert mapping == {stage: shape.placement.rank_of(stage) for stage in range(shape.num_stages)}
