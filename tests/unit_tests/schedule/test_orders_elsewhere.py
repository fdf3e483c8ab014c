"""Our orders against those of Megatron and of torch, where theirs are right."""

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


def ours(actions):
    """Torch's compute actions as ours; None are idle steps."""
    return [
        Action(KINDS[action.computation_type], action.stage_index, action.microbatch_index, 0)
        for action in actions
        if action is not None and action.computation_type in KINDS
    ]


def torch_order(name, ranks, microbatches):
    """The order of a torch schedule, without the process groups that its constructor wants."""
    schedule = object.__new__(getattr(pipelining, name))
    schedule._num_stages, schedule._n_microbatches = ranks, microbatches
    return schedule._get_pipeline_order()


@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (2, 2), (4, 4), (4, 9), (8, 16)])
def test_gpipe_is_torchs(ranks, microbatches):
    schedule = build("gpipe", Shape(Placement(ranks), microbatches))
    order = torch_order("ScheduleGPipe", ranks, microbatches)
    assert [ours(order[rank]) for rank in range(ranks)] == list(map(list, schedule.ranks))


@pytest.mark.parametrize("ranks, microbatches", [(2, 2), (4, 4), (4, 9), (8, 16)])
def test_1f1b_is_torchs_but_for_the_last_rank(ranks, microbatches):
    schedule = build("1f1b", Shape(Placement(ranks), microbatches))
    order = torch_order("Schedule1F1B", ranks, microbatches)
    for rank in range(ranks - 1):
        assert ours(order[rank]) == list(schedule.ranks[rank])
    # Torch numbers the forwards of the last rank from 1 on, so this one cannot be compared.
    assert ours(order[ranks - 1])[0] == Action(Kind.F, ranks - 1, 1, 0)


@pytest.mark.parametrize("ranks, chunks, microbatches", [(2, 2, 4), (4, 2, 8), (4, 3, 4), (8, 2, 16)])
def test_interleaved_is_torchs(ranks, chunks, microbatches):
    schedule = build("1f1b", Shape(Placement(ranks, chunks), microbatches))
    theirs = object.__new__(pipelining.ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages = ranks, chunks
    theirs._n_microbatches, theirs.microbatches_per_round = microbatches, ranks
    for rank in range(ranks):
        assert ours(theirs._calculate_single_rank_operations(rank)) == list(schedule.ranks[rank])


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
