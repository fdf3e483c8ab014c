"""One training step: reports, and gradients by name."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank

from functional_tests.equality.batches import BATCH, batches
from functional_tests.equality.cases import Case
from functional_tests.equality.experts import set_biases
from functional_tests.equality.layout import named
from functional_tests.equality.models import SEQUENCE
from megatron.seq1f1b.patches import Patch, PatchTable, patched


def forward_step(data_iterator, model):
    """Like pretrain_gpt.py's, with the loss summed in fp64."""
    module = model.module
    batch = next(data_iterator) if module.pre_process or module.post_process or module.mtp_process else {}
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group, use_per_sequence_balancing=True)
    packing = {}
    if "cu_seqlens" in batch:
        bounds, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"].max())
        packing["packed_seq_params"] = PackedSeqParams("thd", bounds, bounds, None, None, longest, longest)
    inputs = (batch.get(name) for name in ("tokens", "position_ids", "attention_mask"))
    with patched(rolls_within(batch.get("rolled_within"))):
        output = model(*inputs, labels=batch.get("labels"), loss_mask=batch.get("loss_mask"), **packing)

    def loss_func(losses):
        mask = batch["loss_mask"].double()
        loss, count = (losses.double() * mask).sum(), mask.sum().int()
        return loss, count, {"lm loss": torch.stack([loss.detach(), count.double()])}

    return output, loss_func


def rolls_within(bounds: torch.Tensor | None) -> PatchTable:
    """Makes multi-token prediction shift within documents, which Megatron does for one sequence in the packed format,
    while its attention is given a mask, which is all that it takes on a CPU."""
    if bounds is None:
        return ()

    def rolled(upstream):
        def roll_rows(tensor, **options):
            rows = []
            for row, ends in zip(tensor.split(1), bounds, strict=True):
                options["packed_seq_params"] = PackedSeqParams("thd", ends, ends)
                rows.append(upstream(row, **options)[0])
            return torch.cat(rows), sum(row.sum() for row in rows)

        return roll_rows

    name = "megatron.core.transformer.multi_token_prediction.roll_tensor"
    return (Patch(name, rolled, "rolls across documents without the format", wraps=True),)


def run(schedule, chunks, case: Case, first: int, step: int, forward_only: bool = False, groups=None):
    """Reports and gradients by name of one step, biases of experts too; no gradients where `forward_only`."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    biases = set_biases(chunks)
    data = list(batches(case, first, step))
    with torch.set_grad_enabled(not forward_only):
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(data) for _ in chunks],
            model=chunks,
            num_microbatches=len(data),
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            pg_collection=groups,
        )
    if case.packed == "apart":
        reports = joined(reports, [batch["part_of"] for batch in data])
    for report in reports:  # of the tokens of one context-parallel rank each
        dist.all_reduce(report["lm loss"], group=parallel_state.get_context_parallel_group())
    if not forward_only:
        gather_sharded_gradients(chunks)
    gradients = {name: param.main_grad for name, param in named(chunks)}
    return reports, {name: tensor.clone() for name, tensor in (gradients | biases).items()}


def joined(reports: list[dict], microbatches: list[int]) -> list[dict]:
    """Of documents that were run apart, the reports of the micro-batches that they are from."""
    totals: dict[int, torch.Tensor] = {}
    for report, microbatch in zip(reports, microbatches, strict=True):
        totals[microbatch] = totals.get(microbatch, 0) + report["lm loss"]
    return [{"lm loss": total} for total in totals.values()]


def gather_sharded_gradients(chunks) -> None:
    """With the distributed optimizer a rank has its shard of each bucket reduced; the other shards come from theirs."""
    for bucket in (bucket for chunk in chunks for group in chunk.bucket_groups for bucket in group.buckets):
        if chunks[0].ddp_config.use_distributed_optimizer:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
