"""Model chunks of `--pipeline-placement v`, built by Megatron's code for looped chunks.

Megatron derives what a chunk contains from its rank and its number there. A chunk that runs back is built as if on the
rank that holds its depth in the looped placement.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..process.patches import Patch, PatchTable, patched, wrapping
from ..runtime.gradients.gradient_sync import tied_embeddings
from ..schedule import Placement

_RANK = "megatron.core.parallel_state.get_pipeline_model_parallel_rank"
# Megatron's own, which is replaced while a chunk is built.
_pipeline_rank = parallel_state.get_pipeline_model_parallel_rank


def looped_group(stage: int, num_ranks: int) -> Any:
    """Replaces the pipeline group of a chunk that runs back: its rank is that of the looped chunk of its stage."""
    return SimpleNamespace(rank=lambda: stage % num_ranks, size=lambda: num_ranks)


def at_stage(placement: Placement, stage: int, groups: Any) -> Any:
    """Megatron's process groups to build the chunk of `stage`; those of a step are the first chunk's, which never runs
    back."""
    if placement.rank_of(stage) == stage % placement.num_ranks:
        return groups
    groups_of_stage = copy(groups)
    groups_of_stage.pp = looped_group(stage, placement.num_ranks)
    return groups_of_stage


def building(placement: Placement, stage: int) -> PatchTable:
    """Patches of what Megatron looks up, besides process groups, while it builds the chunk of `stage`."""

    def part(select: Callable, pattern: str, pipeline: Any, chunk: int, *rest: Any, **more: Any) -> Any:
        # Megatron numbers the parts of a pattern by depth if the pipeline has one rank.
        return select(pattern, None, stage, *rest, **more)

    reason = "a chunk that runs back is as deep as a looped one of another rank"
    hybrid = "megatron.core.models.hybrid.hybrid_layer_allocation.select_pipeline_segment"
    return Patch(_RANK, looped_group(stage, placement.num_ranks).rank, reason), wrapping(hybrid, part, reason)


def in_forward_step(stage: int) -> ExitStack:
    """A context for a user's forward step, which chooses the entries of a batch by the rank, here that of the looped
    chunk of `stage`."""
    group = looped_group(stage, parallel_state.get_pipeline_model_parallel_world_size())
    return patched((Patch(_RANK, group.rank, "a script reads for a looped chunk"),))


def patches() -> PatchTable:
    """Patches with which Megatron's training loop builds, feeds and saves V-shaped chunks."""
    built = "builds looped chunks"
    state = "megatron.core.parallel_state"
    layout = "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout"
    predictions = "megatron.core.transformer.multi_token_prediction.MTPLossLoggingHelper.reduce_metrics_in_tracker"
    return (
        wrapping("megatron.training.models.dist_utils.build_virtual_pipeline_stages", _v_shaped, built),
        wrapping("megatron.training.training.get_model", _v_shaped, built),
        wrapping(f"{state}.is_pipeline_last_stage", _is_last_stage, "seeks the loss on the last rank"),
        wrapping(f"{state}.initialize_model_parallel", _with_embedding_ranks, "seeks the output on the last rank"),
        wrapping(f"{layout}.get_layer_offset", _layer_offset, "counts the layers before a looped chunk"),
        wrapping(predictions, _predictions_on_last_rank, "logs those of the last rank, which has none"),
    )


def _placement(num_ranks: int | None = None) -> Placement:
    num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return Placement(num_ranks or parallel_state.get_pipeline_model_parallel_world_size(), num_chunks, "v")


def _v_shaped(build_chunks: Callable, build_one: Callable, *args: Any, **options: Any) -> list[torch.nn.Module]:
    chunks = build_chunks(partial(_build, build_one), *args, **options)
    if weights := tied_embeddings(chunks):
        embedding, output = weights
        output.data.copy_(embedding.data)  # equal from the start, as Megatron makes them by a reduction over two ranks
    return chunks


def _build(build_one: Callable, *groups: Any, vp_stage: int | None = None, **options: Any) -> torch.nn.Module:
    if vp_stage is None:
        return build_one(*groups, **options)
    placement = _placement()
    stage = placement.stage_of(_pipeline_rank(), vp_stage)
    options |= {"pre_process": stage == 0, "post_process": stage == placement.num_stages - 1, "vp_stage": vp_stage}
    if "pg_collection" in options:
        options["pg_collection"] = at_stage(placement, stage, options["pg_collection"])
    groups = tuple(at_stage(placement, stage, group) for group in groups)
    with patched(building(placement, stage)):
        return build_one(*groups, **options)


def _is_last_stage(upstream: Callable[..., bool], ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    if ignore_virtual or vp_stage is None:
        return upstream(ignore_virtual, vp_stage)
    placement = _placement()
    return placement.stage_of(_pipeline_rank(), vp_stage) == placement.num_stages - 1


def _with_embedding_ranks(initialize: Callable[..., None], *args: Any, **options: Any) -> None:
    def embedding_ranks(ranks: list[int]) -> list[int]:
        placement = _placement(len(ranks))
        return sorted({ranks[placement.rank_of(stage)] for stage in (0, placement.num_stages - 1)})

    initialize(*args, **options | {"get_embedding_ranks": embedding_ranks})


def _layer_offset(
    upstream: Callable[..., int], layout: Any, layer_type: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    placement = _placement()
    if vp_stage is not None and pp_rank is None:
        pp_rank = placement.stage_of(_pipeline_rank(), vp_stage) % placement.num_ranks
    return upstream(layout, layer_type, vp_stage, pp_rank)


def _predictions_on_last_rank(reduce: Callable[[], None]) -> None:
    """Send the losses of multi-token prediction from the rank of the loss to the last one, which logs them."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    reduce()
    placement = _placement()
    source = placement.rank_of(placement.num_stages - 1)
    last = placement.num_ranks - 1
    if source == last or _pipeline_rank() not in (source, last):
        return
    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(pipeline)
    if _pipeline_rank() == source:
        own = {name: tracker[name].cpu() for name in ("loss_values", "correct_values", "total_values")}
        dist.send_object_list([own], ranks[last], group=pipeline)
    else:
        arrived: list[Any] = [None]
        dist.recv_object_list(arrived, ranks[source], group=pipeline)
        device = torch.cuda.current_device()
        tracker.update((name, value.to(device)) for name, value in arrived[0].items())
