"""The model that a benchmark trains: a GPT or a hybrid model on the ranks of one pipeline."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron.seq1f1b.costs.model_shape import DeltaNet
from megatron.seq1f1b.launch.v_chunks import at_stage, building
from megatron.seq1f1b.model import use_segment_attention
from megatron.seq1f1b.platform.local_hybrid import local_hybrid_spec
from megatron.seq1f1b.process.patches import patched
from megatron.seq1f1b.rehearsal.ledger import Ledger
from megatron.seq1f1b.schedule import Placement


def use_ranks(num_chunks: int, context_parallel_size: int = 1, replicas: int = 1) -> None:
    """Make a pipeline for each replica of all ranks, for models of so many chunks a rank; ends those that were there
    before."""
    if parallel_state.model_parallel_is_initialized():
        for group in filter(None, parallel_state._global_process_group_list):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
    virtual = num_chunks if num_chunks > 1 else None
    parallel_state.initialize_model_parallel(
        1,
        dist.get_world_size() // context_parallel_size // replicas,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=context_parallel_size,
    )
    model_parallel_cuda_manual_seed(1)


def build_model(args: argparse.Namespace, num_chunks: int, style: str = "looped") -> list[torch.nn.Module]:
    """The model chunks of this rank, in bf16 on a GPU and fp32 on a CPU. Every schedule gets our attention kernel."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    num_ranks = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    placement = Placement(num_ranks, num_chunks, style)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        cp_comm_type="a2a",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **(_hybrid_sizes(args) if args.hybrid_layer_pattern else {}),
    )
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for chunk, stage in enumerate(placement.stages_of(rank)):
        kind = GPTModel
        spec = get_gpt_layer_local_spec()
        pattern = {}
        if args.hybrid_layer_pattern:
            kind = HybridModel
            spec = local_hybrid_spec(config)
            pattern = {"hybrid_layer_pattern": args.hybrid_layer_pattern}
        with patched(building(placement, stage)):
            model = kind(
                config,
                spec,
                args.vocab_size,
                args.seq_length,
                pre_process=stage == 0,
                post_process=stage == placement.num_stages - 1,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=chunk if num_chunks > 1 else None,
                pg_collection=at_stage(placement, stage, groups),
                **pattern,
            )
        chunks.append(model.to(torch.cuda.current_device() if torch.cuda.is_available() else "cpu"))
    use_segment_attention(chunks)
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]


@contextmanager
def counted_beside(present: Iterable[torch.Tensor]) -> Iterator[Ledger]:
    """Counts the bytes of storages that are made inside, in one moment; not those of `present`."""
    ledger = Ledger()
    ledger.begin("all")
    with ledger:
        ledger.label([tensor.detach() for tensor in present], None)
        yield ledger


def delta_net(args: argparse.Namespace) -> DeltaNet:
    """Sizes after Qwen3-Next: keys as wide as the model, values twice as wide."""
    heads = args.num_attention_heads
    size = args.hidden_size // args.num_attention_heads
    return DeltaNet(key_heads=heads, value_heads=2 * heads, key_head_dim=size, value_head_dim=size)


def _hybrid_sizes(args: argparse.Namespace) -> dict[str, Any]:
    sizes = delta_net(args)
    return {
        "is_hybrid_model": True,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_head_dim,
        "linear_value_head_dim": sizes.value_head_dim,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


class Batch:
    """One sequence of random tokens, the same in every micro-batch, and Megatron's forward step on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(args.vocab_size, (1, args.seq_length + 1), generator=generator).cuda()
        self.tokens = tokens[:, :-1]
        self.labels = tokens[:, 1:]
        self.positions = torch.arange(args.seq_length, device=tokens.device)[None]

    def as_dict(self) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens, "labels": self.labels, "position_ids": self.positions}

    @staticmethod
    def forward_step(data_iterator, chunk):
        part = get_batch_on_this_cp_rank(
            dict(next(data_iterator)),  # it cuts in place
            is_hybrid_cp=False,
            cp_group=parallel_state.get_context_parallel_group(),
            use_per_sequence_balancing=False,
        )
        output = chunk(part["tokens"], part["position_ids"], None, labels=part["labels"])
        return output, lambda losses: (losses.sum(), torch.tensor(losses.numel(), device=losses.device), {})
