"""What callers of Megatron's three `forward_backward_*` functions see: of these, and of our executor in their place.

Started on four ranks, or on eight, then in pairs of tensor-parallel ranks. Every check that compares runs the same
calls twice, on models without any code of Megatron's.
"""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron.seq1f1b import cpu

cpu.activate()

from megatron.core import ModelParallelConfig, parallel_state  # noqa: E402
from megatron.core.hyper_comm_grid import HyperCommGrid  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.pipeline_parallel.schedules import (  # noqa: E402
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402

from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation  # noqa: E402
from megatron.seq1f1b.schedule import ScheduleChoice  # noqa: E402
from support.linear_stages import (  # noqa: E402
    BATCH,
    HIDDEN,
    SEQUENCE,
    Stage,
    call,
    configuration,
    run_checks,
    sum_of_squares,
)

ALONE = forward_backward_no_pipelining
PIPELINE = forward_backward_pipelining_without_interleaving
INTERLEAVED = forward_backward_pipelining_with_interleaving
OURS = PipelineExecutor(ScheduleChoice("1f1b"), Segmentation())
RANKS = 4
TENSOR = int(os.environ["WORLD_SIZE"]) // RANKS


def pipeline_rank() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


class Timers:
    """Stands in for Megatron's."""

    def __init__(self) -> None:
        self.started = []

    def __call__(self, name: str, log_level: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(
            start=lambda barrier=False: self.started.append((name, log_level, barrier)), stop=lambda: None
        )


def chunks(count: int = 1, ranks: int = RANKS, **config) -> list[Stage]:
    """Of this rank; chunks of different sizes if there are several."""
    made = configuration(ranks, virtual_pipeline_model_parallel_size=count if count > 1 else None, **config)
    rank = pipeline_rank() if ranks > 1 else 0
    return [Stage(made, c * ranks + rank, c if count > 1 else None, 1 + c) for c in range(count)]


def summed(data_iterator, model):
    return model(next(data_iterator)), sum_of_squares


def integers(data_iterator, model):
    """Data that nobody reads, losses and reports that are no tensors."""
    return torch.rand(SEQUENCE, BATCH, HIDDEN), lambda output: (5, {"loss": 7})


def seen(function, count: int, m: int, ranks: int = RANKS, config: dict | None = None, per_token_loss=False, **given):
    """All that a caller can observe of one call on a new model: what it returns, gradients, hooks, timers."""
    model = chunks(count, ranks, **(config or {}))
    timers, finalized = Timers(), []
    model[0].config.timers = timers
    model[0].config.calculate_per_token_loss = per_token_loss

    def finalize(model, num_tokens, *, pg_collection, force_all_reduce) -> None:
        count = num_tokens if num_tokens is None else int(num_tokens)
        finalized.append((len(model), count, pg_collection.cp.size(), force_all_reduce))

    model[0].config.finalize_model_grads_func = finalize
    reports = call(function, model, m, **given)
    compute = [entry for entry in timers.started if not entry[0].endswith(("-recv", "-send"))]
    return {
        "reports": [{name: float(value) for name, value in report.items()} for report in reports],
        "gradients": [None if p.grad is None else p.grad.tolist() for chunk in model for p in chunk.parameters()],
        "calls": [chunk.calls for chunk in model],
        "timers": sorted(compute, key=str),
        "finalized": finalized,
    }


def same(function, *args, **kwargs) -> dict:
    expected, actual = (seen(each, *args, **kwargs) for each in (function, OURS))
    for what, value in expected.items():
        assert actual[what] == value, f"{args} {kwargs}: {what} is {actual[what]}, with {function.__name__} {value}"
    return actual


def groups_by_hand(shape: list[int]) -> tuple[P2PCommunicator, ProcessGroupCollection]:
    grid = HyperCommGrid(shape, ["tp", "cp", "pp", "dp"])
    collection = ProcessGroupCollection(embd=None, pos_embd=None)
    for name in ("tp", "cp", "pp"):
        setattr(collection, name, grid.create_pg(name))
    collection.dp_cp = grid.create_pg(["dp", "cp"])
    config = ModelParallelConfig(pipeline_model_parallel_size=collection.pp.size(), pipeline_dtype=torch.float32)
    return P2PCommunicator(collection.pp, config), collection


def check_no_pipeline() -> None:
    """The lengths and the iterator may be nothing at all."""
    parallel_state.initialize_model_parallel(TENSOR, 1)
    unread = {"step": integers, "data_iterator": range(9), "seq_length": None, "micro_batch_size": None}
    assert call(OURS, chunks(1, 1), 4, forward_only=True, **unread) == [{"loss": 7}] * 4
    for m in (1, 3):
        same(ALONE, 1, m, 1)
        same(ALONE, 1, m, 1, step=summed, per_token_loss=m == 3)
    _, collection = groups_by_hand([2, 1, 1, 2 * TENSOR])
    same(ALONE, 1, 3, 1, pg_collection=collection, force_all_reduce=True)
    parallel_state.destroy_model_parallel()


def check_one_chunk_a_rank() -> None:
    parallel_state.initialize_model_parallel(TENSOR, RANKS)
    last = pipeline_rank() == RANKS - 1
    reports = call(OURS, chunks(), 8, step=integers, data_iterator=None, forward_only=True)
    assert reports == ([{"loss": 7}] * 8 if last else [])
    for m in (1, 3, 4, 9):
        same(PIPELINE, 1, m)
        same(PIPELINE, 1, m, forward_only=True)
        same(PIPELINE, 1, m, step=summed, per_token_loss=m == 3)
    same(PIPELINE, 1, 3, config={"deallocate_pipeline_outputs": True})
    communicator, collection = groups_by_hand([TENSOR, 1, 4, 1])
    same(PIPELINE, 1, 3, p2p_communicator=communicator, pg_collection=collection, force_all_reduce=True)
    parallel_state.destroy_model_parallel()


def check_interleaved_chunks_of_unequal_size() -> None:
    parallel_state.initialize_model_parallel(TENSOR, RANKS, 2)
    last = pipeline_rank() == RANKS - 1
    unread = {"step": integers, "data_iterator": [range(9), range(9)], "forward_only": True}
    for chunk in (chunks(2), [chunks(2)[1]] * 2):
        for decoder_length in (None, SEQUENCE, 2 * SEQUENCE):
            for one in chunk:
                one.vp_stage = None if chunk[0] is chunk[1] else one.vp_stage
            assert call(OURS, chunk, 8, decoder_seq_length=decoder_length, **unread) == [{"loss": 7}] * 8 * last
    for m, group_size in ((4, 4), (8, 4), (10, 5), (9, 5), (10, 6)):
        config = {"microbatch_group_size_per_vp_stage": group_size}
        same(INTERLEAVED, 2, m, config=config)
        same(INTERLEAVED, 2, m, config=config, forward_only=True)
    communicator, collection = groups_by_hand([TENSOR, 1, 4, 1])
    communicator.virtual_pipeline_model_parallel_size = 2
    same(INTERLEAVED, 2, 4, p2p_communicator=communicator, pg_collection=collection)
    parallel_state.destroy_model_parallel()


def check_what_is_not_a_loss() -> None:
    """Outputs as they are, dictionaries too, and what `non_loss_data` gives."""

    def outputs(data_iterator, model):
        output = model(next(data_iterator))
        return ({"logits": output} if pipeline_rank() == RANKS - 1 else output), None

    def shapes(data_iterator, model):
        return model(next(data_iterator)), lambda output, non_loss_data=False: non_loss_data and output.shape

    parallel_state.initialize_model_parallel(TENSOR, RANKS)
    for step, collect in ((outputs, False), (shapes, True)):
        given = {"step": step, "forward_only": True, "collect_non_loss_data": collect}
        expected = call(PIPELINE, chunks(), 3, **given)
        actual = call(OURS, chunks(), 3, **given)
        assert len(actual) == (3 if pipeline_rank() == RANKS - 1 else 0)
        for mine, theirs in zip(actual, expected, strict=True):
            assert mine == theirs if collect else torch.equal(mine["logits"], theirs["logits"])
    parallel_state.destroy_model_parallel()


def check_first_step_of_a_validation() -> None:
    """Transformer Engine is notified once a step, in a validation once in its first step."""
    parallel_state.initialize_model_parallel(TENSOR, RANKS)
    for first_val_step in (None, True, False):
        for forward_only in (True, False):
            same(PIPELINE, 1, 5, first_val_step=first_val_step, forward_only=forward_only)
    parallel_state.destroy_model_parallel()


def check_names_of_timers() -> None:
    """All that ours use are names that Megatron logs."""
    parallel_state.initialize_model_parallel(TENSOR, RANKS)
    timers, model = Timers(), chunks()
    model[0].config.timers = timers
    call(OURS, model, 4)
    expected = {("forward-backward", 1, True), ("forward-compute", 2, False), ("backward-compute", 2, False)}
    assert set(timers.started) == expected, timers.started
    parallel_state.destroy_model_parallel()


def main() -> None:
    dist.init_process_group("gloo")
    run_checks(globals())
    dist.barrier()


if __name__ == "__main__":
    main()
