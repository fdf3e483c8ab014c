"""Our orders against those of Megatron."""

from types import SimpleNamespace

import pytest

from megatron.seq1f1b.schedule import Action, Kind, Placement, Shape, build

megatron = pytest.importorskip("megatron.core.pipeline_parallel.schedules")


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
