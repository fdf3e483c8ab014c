"""Losses of a few steps of a small GPT: on the pipeline ranks that torchrun started, which share one GPU over gloo.

With `--segments 0` it is Megatron's own run on one rank, with its own attention and schedule. NCCL cannot be tried this
way: it refuses two ranks on one GPU.
"""

import zlib

import torch
import torch.distributed as dist
from common import Report, parse, start_megatron
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.seq1f1b.partition import even
from megatron.seq1f1b.runtime import PipelineExecutor
from megatron.seq1f1b.schedule import Named

LAYERS, HIDDEN, HEADS, VOCABULARY, MICROBATCHES, STEPS = 4, 128, 4, 256, 4, 3


def build(length: int, dtype: torch.dtype, device: str) -> GPTModel:
    """The layers of this rank; a layer has the same weights on any number of ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=ranks,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        length,
        pre_process=rank == 0,
        post_process=rank == ranks - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.layers."):
                local = name.split(".")[2]
                number = model.decoder.layers[int(local)].layer_number
                name = name.replace(f"layers.{local}", f"layers.{number}", 1)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 if parameter.dim() > 1 else 1 + 0.1 * noise)
    return model


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses):
        total, count = losses.float().sum(), torch.tensor(losses.numel(), device=losses.device)
        return total, count, {"loss": torch.stack([total.detach(), count])}

    return output, loss


def batches(length: int, step: int, device: str):
    for microbatch in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(MICROBATCHES * step + microbatch)
        tokens = torch.randint(VOCABULARY, (1, length + 1), generator=generator).to(device)
        positions = torch.arange(length, device=device)[None]
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}


def losses_of(schedule, model: GPTModel, length: int, device: str) -> list[float]:
    """The mean loss of every step of gradient descent, on the last rank; elsewhere nothing."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=batches(length, step, device),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=length,
            micro_batch_size=1,
            forward_only=False,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
        if reports:
            total, count = torch.stack([report["loss"].double() for report in reports]).sum(0).tolist()
            found.append(total / count)
    return found


def main() -> None:
    args = parse(segments=0)
    if args.device == "cuda":
        torch.cuda.set_device(0)
    start_megatron()
    length = 64 if args.tiny else 4096
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build(length, dtype, args.device)
        schedule = forward_backward_no_pipelining
        if args.segments:
            schedule = PipelineExecutor(Named("1f1b"), args.segments, lambda length: even(length, args.segments, 1))
        losses[str(dtype).removeprefix("torch.")] = losses_of(schedule, model, length, args.device)
    if parallel_state.is_pipeline_last_stage():
        Report(args.output).figure(**losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
