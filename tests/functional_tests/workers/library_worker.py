"""A program that uses megatron-core as a library; with flags it trains one step under our schedules.

Started on two ranks. Writes its reports and gradients to the file RESULT.RANK; further arguments are `name=value` for
`install`. DOCUMENTS is how the program tells of documents, if it has any: by a `mask` in its batches that its model
gets, by `cu_seqlens` in its batches, or by `packed_seq_params` for its model. With IMPORTED_BEFORE the program imports
Megatron's function before it installs our schedules. With STEPS it trains so many steps of Adam, in fp32, with two
model chunks on a rank and the distributed optimizer, each on the gradients of CALLS calls of Megatron's function, and
the file has its weights instead. EXPERTS is the number of ranks that its layers of experts are divided among. Has
nothing of megatron.training.
"""

import os
import sys
from dataclasses import replace

import megatron.seq1f1b
from megatron.seq1f1b import cpu

OPTIONS = {name: value == "True" or value for name, value in (argument.split("=") for argument in sys.argv[2:])}
if "IMPORTED_BEFORE" in os.environ:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as imported_before
if OPTIONS:
    megatron.seq1f1b.install(**OPTIONS)
cpu.activate()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from functional_tests.equality.models import VOCABULARY, Model, mixture  # noqa: E402

SEQUENCE, BATCH, MICROBATCHES = 32, 2, 3
DOCUMENTS = os.environ.get("DOCUMENTS")
STEPS = int(os.environ.get("STEPS", 0))
CALLS = int(os.environ.get("CALLS", 1))  # whose gradients a step of Adam adds up
TYPE = torch.float32 if STEPS else torch.float64
CHUNKS = 2 if STEPS else None
EXPERT_PARALLEL = int(os.environ.get("EXPERTS", 1))
STARTS = [[0, 5, 18], [0, 16, 31]]


def build(chunk: int | None = None) -> DistributedDataParallel:
    plain = Model(TYPE)
    if EXPERT_PARALLEL > 1:
        plain = replace(mixture(moe_token_dispatcher_type="alltoall"), dtype=TYPE, layers=4)
    config = plain.transformer_config(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=CHUNKS,
        expert_model_parallel_size=EXPERT_PARALLEL,
    )
    config.finalize_model_grads_func = finalize_model_grads
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
    model = plain.build(config, is_first, is_last, chunk)
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options if STEPS else {}), model)


def batches(call: int = 0):
    generator = torch.Generator().manual_seed(1 + call)
    for _ in range(MICROBATCHES):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        mask = (torch.rand(BATCH, SEQUENCE, generator=generator) < 0.6).double()
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask}
        if DOCUMENTS == "mask":
            batch["attention_mask"] = hidden()
        elif DOCUMENTS == "cu_seqlens":
            batch["cu_seqlens"] = torch.tensor([[*starts, SEQUENCE] for starts in STARTS], dtype=torch.int32)
        yield batch


def hidden() -> torch.Tensor:
    """Other documents and later tokens: [b, 1, s, s]."""
    begins = torch.zeros(BATCH, SEQUENCE, dtype=torch.int).scatter_(1, torch.tensor(STARTS), 1)
    document = begins.cumsum(1)
    others = document[:, :, None] != document[:, None]
    return (others | torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1))[:, None]


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    positions = torch.arange(batch["tokens"].shape[1]).expand(BATCH, -1)
    packing = None
    if DOCUMENTS == "packed_seq_params":
        packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 32]))
    mask = batch.get("attention_mask")
    output = model(batch["tokens"], positions, mask, labels=batch["labels"], packed_seq_params=packing)

    def loss_func(losses):
        loss, count = (losses * batch["mask"]).sum(), batch["mask"].sum().int()
        return loss, count, {"loss": torch.stack([loss.detach(), count.double()])}

    return output, loss_func


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2, CHUNKS, expert_model_parallel_size=EXPERT_PARALLEL)
    model_parallel_cuda_manual_seed(1)
    if STEPS:
        return train([build(chunk) for chunk in range(CHUNKS)])
    model = build()
    get_function = imported_before if "IMPORTED_BEFORE" in os.environ else get_forward_backward_func
    reports = get_function()(
        forward_step_func=forward_step,
        data_iterator=batches(),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    gradients = {name: param.main_grad for name, param in model.module.named_parameters()}
    torch.save((reports, gradients), f"{sys.argv[1]}.{dist.get_rank()}")


def train(chunks) -> None:
    config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=0.1)
    optimizer = get_megatron_optimizer(config, chunks)
    losses = []
    for _ in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for call in range(CALLS):
            for chunk in chunks:
                chunk.config.finalize_model_grads_func = finalize_model_grads if call == CALLS - 1 else None
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[batches(call) for _ in chunks],
                model=chunks,
                num_microbatches=MICROBATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
            )
        _, norm, _ = optimizer.step()
        losses.append(([report["loss"] for report in reports], norm))
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)  # which overlap_param_gather leaves to the next forward
    there = sum(parameter.untyped_storage().nbytes() for chunk in chunks for parameter in chunk.parameters())
    with megatron.seq1f1b.whole_weights(chunks):
        weights = [parameter.clone() for chunk in chunks for parameter in chunk.parameters()]
    torch.save((losses, weights, there), f"{sys.argv[1]}.{dist.get_rank()}")


if __name__ == "__main__":
    main()
