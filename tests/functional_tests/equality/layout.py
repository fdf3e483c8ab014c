"""A model cut over ranks by a layout, with the same parameters in every layout."""

import re
import zlib
from functools import cache

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from functional_tests.equality.cases import Layout
from functional_tests.equality.models import Model
from megatron.seq1f1b.launch.v_chunks import at_stage, building
from megatron.seq1f1b.model import use_segment_attention
from megatron.seq1f1b.process.patches import patched

SIZES: dict[str, int | None] = {}  # of the groups that there are


def sizes_of(layout: Layout) -> dict[str, int | None]:
    """By the names that Megatron's groups and its configuration have in common."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor or layout.tensor,
    }


def use_ranks(layout: Layout) -> None:
    """Assign ranks their parts; keeps the process groups if they fit, and destroys them otherwise.

    Megatron only forgets its groups, but each of gloo's costs threads that wake up a hundred times a second.
    """
    sizes = sizes_of(layout)
    if sizes == SIZES:
        return
    if SIZES:
        for group in filter(None, parallel_state._global_process_group_list):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    SIZES.update(sizes)


def build(model: Model, layout: Layout) -> list[torch.nn.Module]:
    """The model chunks of this rank; every parameter has the same values in every layout."""
    use_ranks(layout)
    # These count the layers of the first model that they meet.
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()
    config = model.transformer_config(
        **sizes_of(layout),
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_layout=layout.parts,
        cp_comm_type="all_gather" if layout.gathers_keys else "a2a",
    )
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for chunk in range(layout.chunks):
        stage = layout.placement.stage_of(parallel_state.get_pipeline_model_parallel_rank(), chunk)
        is_last = stage == layout.pipeline * layout.chunks - 1
        number = chunk if layout.chunks > 1 else None
        with patched(building(layout.placement, stage)):
            chunks.append(model.build(config, stage == 0, is_last, number, groups_of(layout, stage)))
    if layout.context > 1:  # as the training scripts do, for sequences that are not cut
        use_segment_attention(chunks)
    if model.dtype is torch.float64:
        for module in (module for chunk in chunks for module in chunk.modules()):
            _compute_angles_in_fp64(module)
    with torch.no_grad():
        for name, param in named(chunks):
            param.copy_(initial(name, param))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False,
        overlap_grad_reduce=layout.overlap,
        use_distributed_optimizer=layout.distributed_optimizer,
        bucket_size=4000 if layout.overlap else None,  # several for a chunk
    )
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    # As Megatron's training loop does: bare for one chunk, a list for several.
    if layout.overlap:
        config.no_sync_func = _bare_if_one([chunk.no_sync for chunk in wrapped])
    if layout.align:
        config.grad_sync_func = _bare_if_one([chunk.start_grad_sync for chunk in wrapped])
    return wrapped


def _compute_angles_in_fp64(rotary: torch.nn.Module) -> None:
    """Rotations depend on differences of positions: packs count them from another start than single documents, and the
    angles of Megatron, in fp32, would round otherwise."""
    for name in ("inv_freq", "inv_freq_extra", "inv_freq_inter"):
        if isinstance(frequencies := getattr(rotary, name, None), torch.Tensor):
            setattr(rotary, name, frequencies.double())


def groups_of(layout: Layout, stage: int | None = None) -> ProcessGroupCollection | None:
    """Megatron's groups; of the ranks of a V no two share an embedding, and their chunks lie as deep as their stage.

    Where parts are laid out, the embedding is on the first rank and on that of multi-token prediction.
    """
    if "m" in (layout.parts or ""):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        ranks = 0, next(rank for rank, part in enumerate(layout.parts.split("|")) if "m" in part)
        group = _group(*ranks)
        groups.embd = group if dist.get_rank() in ranks else groups.cp  # of this rank alone
        return groups
    if layout.style == "looped":
        return None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.embd = groups.pos_embd = groups.cp  # of this rank alone
    if stage is not None:
        groups = at_stage(layout.placement, stage, groups)
    return groups


@cache
def _group(*ranks: int) -> dist.ProcessGroup:
    return dist.new_group(sorted({*ranks}))


def _bare_if_one(hooks: list):
    return hooks[0] if len(hooks) == 1 else hooks


# Of the norms that Transformer Engine computes in the linear layer behind them.
LOCAL_NAMES = {
    f"{linear}.layer_norm_{kind}": f"{norm}.{kind}"
    for linear, norm in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm"))
    for kind in ("weight", "bias")
}
EXPERTS = ".experts.local_experts."
# Of Transformer Engine's grouped products, which have a weight for each expert in one layer.
GROUPED = re.compile(r"(mlp\.experts)\.(linear_fc[12])\.weight(\d+)$")


def named(chunks):
    """(name in the whole model, parameter) of the chunks of this rank; bare or wrapped."""
    for chunk in chunks:
        chunk = getattr(chunk, "module", chunk)
        for name, param in chunk.named_parameters():
            name = GROUPED.sub(r"\1.local_experts.\3.\2.weight", name)
            if EXPERTS in name:
                path, rest = name.split(EXPERTS)
                number, rest = rest.split(".", 1)
                experts = chunk.get_submodule(path).local_expert_indices
                name = f"{path}{EXPERTS}{experts[int(number)]}.{rest}"
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                layer = chunk.decoder.layers[int(local)]
                name = f"decoder.layers.{layer.layer_number - 1}.{LOCAL_NAMES.get(rest, rest)}"
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield name, param


def initial(name: str, param: torch.Tensor) -> torch.Tensor:
    """Weights large enough that attention is far from uniform; replicated parameters are the same on every rank."""
    shard = 0
    if getattr(param, "tensor_model_parallel", False):
        kind = "expert_tensor" if "local_experts" in name else "tensor_model"
        shard = getattr(parallel_state, f"get_{kind}_parallel_rank")()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shard}".encode()))
    noise = torch.randn(param.shape, generator=generator)
    if "conv1d" in name:
        return noise  # small ones would leave the normalised queries and keys after them to rounding
    return (noise if param.dim() > 1 else 1 + noise / 4 if name.endswith("norm.weight") else noise / 4) * 0.5


def replicas_of(layout: Layout) -> int:
    return dist.get_world_size() // (layout.pipeline * layout.tensor * layout.context)


def has_loss(layout: Layout) -> bool:
    """Whether this rank holds the last stage."""
    last = layout.placement.num_stages - 1
    return parallel_state.get_pipeline_model_parallel_rank() == layout.placement.rank_of(last)
