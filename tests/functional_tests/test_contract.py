"""What callers of Megatron's three `forward_backward_*` functions see: of these, and of our executor in their place.

Each runs the same calls, on models without any code of Megatron's; on eight ranks, in pairs of tensor-parallel ones.
"""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.schedule import ScheduleChoice
from support.linear_stages import BATCH, HIDDEN, SEQUENCE, Stage, call, configuration, summed
from support.on_ranks import on_ranks

OURS = PipelineExecutor(ScheduleChoice("1f1b"), Segmentation())
RANKS = 4


def pipeline(ranks: int = RANKS, chunks: int = 1) -> tuple[int, int]:
    """Megatron's groups of a pipeline of so many ranks: the tensor-parallel size, and the rank in the pipeline."""
    tensor = dist.get_world_size() // RANKS
    parallel_state.initialize_model_parallel(tensor, ranks, chunks if chunks > 1 else None)
    return tensor, parallel_state.get_pipeline_model_parallel_rank()


def groups_by_hand(*sizes: int) -> dict:
    """Arguments with groups of TP, CP, PP and DP ranks that Megatron does not know of."""
    grid = HyperCommGrid(list(sizes), ["tp", "cp", "pp", "dp"])
    collection = ProcessGroupCollection(embd=None, pos_embd=None)
    for name in ("tp", "cp", "pp"):
        setattr(collection, name, grid.create_pg(name))
    collection.dp_cp = grid.create_pg(["dp", "cp"])
    config = ModelParallelConfig(pipeline_model_parallel_size=collection.pp.size(), pipeline_dtype=torch.float32)
    return {"p2p_communicator": P2PCommunicator(collection.pp, config), "pg_collection": collection}


def chunks(count: int = 1, ranks: int = RANKS, **config) -> list[Stage]:
    """Of this rank; chunks of different sizes if there are several."""
    made = configuration(ranks, virtual_pipeline_model_parallel_size=count if count > 1 else None, **config)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return [Stage(made, c * ranks + rank, c if count > 1 else None, 1 + c) for c in range(count)]


def integers(data_iterator, model):
    """Data that nobody reads, losses and reports that are no tensors."""
    return torch.rand(SEQUENCE, BATCH, HIDDEN), lambda output: (5, {"loss": 7})


def seen(function, count: int, m: int, ranks: int = RANKS, config: dict | None = None, per_token_loss=False, **given):
    """All that a caller can observe of one call on a new model: what it returns, gradients, hooks, timers."""
    model = chunks(count, ranks, **(config or {}))
    started, finalized = [], []

    def timer(name: str, log_level: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(start=lambda barrier=False: started.append((name, log_level, barrier)), stop=Mock())

    def finalize(model, num_tokens, *, pg_collection, force_all_reduce) -> None:
        count = num_tokens if num_tokens is None else int(num_tokens)
        finalized.append((len(model), count, pg_collection.cp.size(), force_all_reduce))

    model[0].config.timers, model[0].config.finalize_model_grads_func = timer, finalize
    model[0].config.calculate_per_token_loss = per_token_loss
    reports = call(function, model, m, **given)
    compute = [entry for entry in started if function is OURS or not entry[0].endswith(("-recv", "-send"))]
    return {
        "reports": [{name: float(value) for name, value in report.items()} for report in reports],
        "gradients": [None if p.grad is None else p.grad.tolist() for chunk in model for p in chunk.parameters()],
        "calls": [chunk.calls for chunk in model],
        "timers": sorted(compute, key=str),
        "finalized": finalized,
    }


def same(function, *args, **kwargs) -> None:
    expected, actual = (seen(each, *args, **kwargs) for each in (function, OURS))
    for what, value in expected.items():
        assert actual[what] == value, f"{args} {kwargs}: {what} is {actual[what]}, with {function.__name__} {value}"


@on_ranks(4, 8)
def test_no_pipeline():
    """The lengths and the iterator may be nothing at all."""
    alone = forward_backward_no_pipelining
    tensor, _ = pipeline(ranks=1)
    unread = {"step": integers, "data_iterator": range(9), "seq_length": None, "micro_batch_size": None}
    assert call(OURS, chunks(1, 1), 4, forward_only=True, **unread) == [{"loss": 7}] * 4
    for m in (1, 3):
        same(alone, 1, m, 1)
        same(alone, 1, m, 1, step=summed, per_token_loss=m == 3)
    collection = groups_by_hand(2, 1, 1, 2 * tensor)["pg_collection"]
    same(alone, 1, 3, 1, pg_collection=collection, force_all_reduce=True)


@on_ranks(4, 8)
def test_one_chunk_a_rank():
    function = forward_backward_pipelining_without_interleaving
    tensor, rank = pipeline()
    reports = call(OURS, chunks(), 8, step=integers, data_iterator=None, forward_only=True)
    assert reports == ([{"loss": 7}] * 8 if rank == RANKS - 1 else [])
    for m in (1, 3, 4, 9):
        same(function, 1, m)
        same(function, 1, m, forward_only=True)
        same(function, 1, m, step=summed, per_token_loss=m == 3)
    same(function, 1, 3, config={"deallocate_pipeline_outputs": True})
    same(function, 1, 3, **groups_by_hand(tensor, 1, 4, 1), force_all_reduce=True)
    # Transformer Engine is notified once a step, in a validation once in its first step.
    for first_val_step in (None, True, False):
        for forward_only in (True, False):
            same(function, 1, 5, first_val_step=first_val_step, forward_only=forward_only)


@on_ranks(4, 8)
def test_interleaved_chunks_of_unequal_size():
    function = forward_backward_pipelining_with_interleaving
    tensor, rank = pipeline(chunks=2)
    unread = {"step": integers, "data_iterator": [range(9), range(9)], "forward_only": True}
    for chunk in (chunks(2), [chunks(2)[1]] * 2):
        for decoder_length in (None, SEQUENCE, 2 * SEQUENCE):
            for one in chunk:
                one.vp_stage = None if chunk[0] is chunk[1] else one.vp_stage
            reports = call(OURS, chunk, 8, decoder_seq_length=decoder_length, **unread)
            assert reports == [{"loss": 7}] * 8 * (rank == RANKS - 1)
    for m, group_size in ((4, 4), (8, 4), (10, 5), (9, 5), (10, 6)):
        config = {"microbatch_group_size_per_vp_stage": group_size}
        same(function, 2, m, config=config)
        same(function, 2, m, config=config, forward_only=True)
    by_hand = groups_by_hand(tensor, 1, 4, 1)
    by_hand["p2p_communicator"].virtual_pipeline_model_parallel_size = 2
    same(function, 2, 4, **by_hand)


@on_ranks(4, 8)
@pytest.mark.parametrize("collects", [False, True])
def test_what_is_not_a_loss(collects):
    """Outputs as they are, dictionaries too, and what `non_loss_data` gives."""
    _, rank = pipeline()

    def step(data_iterator, model):
        output = model(next(data_iterator))
        if collects:
            return output, lambda output, non_loss_data=False: non_loss_data and output.shape
        return ({"logits": output} if rank == RANKS - 1 else output), None

    given = {"step": step, "forward_only": True, "collect_non_loss_data": collects}
    expected = call(forward_backward_pipelining_without_interleaving, chunks(), 3, **given)
    actual = call(OURS, chunks(), 3, **given)
    assert len(actual) == (3 if rank == RANKS - 1 else 0)
    for ours, own in zip(actual, expected, strict=True):
        assert ours == own if collects else torch.equal(ours["logits"], own["logits"])
