"""The model that a benchmark trains: a GPT on the ranks of one pipeline."""

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.seq1f1b.model import use_segment_attention


def use_ranks(num_chunks: int) -> None:
    """Make one pipeline of all ranks, for models of so many chunks a rank; ends the one that was there before."""
    if parallel_state.model_parallel_is_initialized():
        for group in filter(None, parallel_state._global_process_group_list):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
    virtual = num_chunks if num_chunks > 1 else None
    parallel_state.initialize_model_parallel(1, dist.get_world_size(), virtual_pipeline_model_parallel_size=virtual)
    model_parallel_cuda_manual_seed(1)


def build_model(args: argparse.Namespace, num_chunks: int) -> list[torch.nn.Module]:
    """The model chunks of this rank, in bf16 on a GPU and fp32 on a CPU. Every schedule gets our attention kernel."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    num_ranks, rank = dist.get_world_size(), parallel_state.get_pipeline_model_parallel_rank()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for chunk in range(num_chunks):
        stage = chunk * num_ranks + rank
        chunks.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(),
                args.vocab_size,
                args.seq_length,
                pre_process=stage == 0,
                post_process=stage == num_ranks * num_chunks - 1,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=chunk if num_chunks > 1 else None,
            ).to(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        )
    use_segment_attention(chunks)
    return [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in chunks]


class Batch:
    """One sequence of random tokens, the same in every micro-batch, and Megatron's forward step on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(args.vocab_size, (1, args.seq_length + 1), generator=generator).cuda()
        self.tokens, self.labels = tokens[:, :-1], tokens[:, 1:]
        self.positions = torch.arange(args.seq_length, device=tokens.device)[None]

    def as_dict(self) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens, "labels": self.labels, "position_ids": self.positions}

    @staticmethod
    def forward_step(data_iterator, chunk):
        part = next(data_iterator)
        output = chunk(part["tokens"], part["position_ids"], None, labels=part["labels"])
        return output, lambda losses: (losses.sum(), torch.tensor(losses.numel(), device=losses.device), {})
