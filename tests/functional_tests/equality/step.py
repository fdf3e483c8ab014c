"""One training step: its micro-batches of random tokens, with masked losses and packed documents; reports, gradients by
name, and what mixtures of experts have beside them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_cp_rank

from functional_tests.equality.cases import Case
from functional_tests.equality.layout import named
from functional_tests.equality.models import SEQUENCE, VOCABULARY
from megatron.seq1f1b.process.patches import Patch, PatchTable, patched


def forward_step(data_iterator, model):
    """Like pretrain_gpt.py's, with the loss summed in fp64."""
    module = model.module
    batch = next(data_iterator) if module.pre_process or module.post_process or module.mtp_process else {}
    group = parallel_state.get_context_parallel_group()
    batch = flatten_batch_for_packed_sequences(dict(batch))
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
        given = {"forward_step_func": forward_step, "data_iterator": [iter(data) for _ in chunks], "model": chunks}
        sizes = {"num_microbatches": len(data), "seq_length": SEQUENCE, "micro_batch_size": case.batch}
        reports = schedule(**given, **sizes, forward_only=forward_only, pg_collection=groups)
    if case.packed == "apart":  # the reports are of documents, those that are wanted of micro-batches
        totals = {}
        for report, batch in zip(reports, data, strict=True):
            totals[batch["part_of"]] = totals.get(batch["part_of"], 0) + report["lm loss"]
        reports = [{"lm loss": total} for total in totals.values()]
    for report in reports:  # of the tokens of one context-parallel rank each
        dist.all_reduce(report["lm loss"], group=parallel_state.get_context_parallel_group())
    if not forward_only:
        gather_sharded_gradients(chunks)
    gradients = {name: param.main_grad for name, param in named(chunks) if param.requires_grad}
    return reports, {name: tensor.clone() for name, tensor in (gradients | biases).items()}


def gather_sharded_gradients(chunks) -> None:
    """With the distributed optimizer a rank has its shard of each bucket reduced; the other shards come from theirs."""
    for bucket in (bucket for chunk in chunks for group in chunk.bucket_groups for bucket in group.buckets):
        if chunks[0].ddp_config.use_distributed_optimizer:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


END = 6


def batches(case: Case, first: int, step: int):
    """Micro-batches `first`, `first + step`, … of random tokens; `mask` zeroes some, or all of one segment."""
    for microbatch in range(first, case.m * step, step):
        generator = torch.Generator().manual_seed(100 + microbatch)
        tokens = torch.randint(VOCABULARY, (case.batch, SEQUENCE + 1), generator=generator)
        loss_mask = torch.ones(case.batch, SEQUENCE)
        if case.mask == "random":
            loss_mask = (torch.rand(case.batch, SEQUENCE, generator=generator) < 0.3 + 0.2 * microbatch).float()
        elif case.mask == "segment":
            start = sum(case.lengths[: microbatch % case.k])
            loss_mask[:, start : start + case.lengths[microbatch % case.k]] = 0 if case.k > 1 else 1
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": loss_mask.double(),  # since Megatron divides sums of it
            "position_ids": torch.arange(SEQUENCE).expand(case.batch, -1),
        }
        if case.packed == "apart":
            yield from apart(batch | packed(tokens[:, :-1], "tokens"), microbatch)
        else:
            yield batch | packed(tokens[:, :-1], case.packed) if case.packed else batch


def apart(batch: dict, microbatch: int):
    """Each document of a batch as a batch of its own, with the number of the micro-batch that it is from."""
    starts = batch["position_ids"] == 0
    for row, found in enumerate(starts):
        bounds = [*found.nonzero().flatten().tolist(), SEQUENCE]
        for start, end in pairwise(bounds):
            yield {name: entry[row : row + 1, start:end] for name, entry in batch.items()} | {"part_of": microbatch}


def packed(tokens: torch.Tensor, form: str) -> dict:
    """Entries of a batch with several documents, each ended by a token below END: positions within them, and a mask or
    cumulative lengths; for "rolls" a mask, and cumulative lengths for multi-token prediction alone."""
    tokens = torch.where(tokens < END, 0, tokens)
    starts = torch.nn.functional.pad(tokens[:, :-1] == 0, (1, 0), value=True)
    documents = starts.cumsum(dim=1)
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    entries = {"tokens": tokens, "position_ids": positions - torch.where(starts, positions, 0).cummax(dim=1).values}
    if form in ("mask", "rolls"):
        sees = (documents[:, :, None] == documents[:, None, :]).tril()
        entries["attention_mask"] = ~sees[:, None]
    bounds = torch.where(starts, positions, SEQUENCE).sort(dim=1).values
    bounds = torch.nn.functional.pad(bounds, (0, 1), value=SEQUENCE).int()
    if form == "rolls":
        entries["rolled_within"] = bounds
    elif form in ("cu_seqlens", "units"):
        entries |= {"cu_seqlens": bounds, "max_seqlen": bounds.diff(dim=1).max(dim=1).values}
    return entries


def set_biases(chunks) -> dict[str, torch.Tensor]:
    """The biases by which routers without balance losses learn balance, far from zero, which would be no bias."""
    routers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))
    found = {f"expert bias of layer {router.layer_number}": router.expert_bias for router in routers}
    return {name: bias.copy_(torch.linspace(-0.2, 0.2, len(bias))) for name, bias in found.items() if bias is not None}


def logged(num_microbatches: int, num_layers: int, kinds: Sequence[str]) -> dict[str, float]:
    """The auxiliary losses of the step as Megatron's training loop logs them; forgets them."""
    losses, names = {}, [kind.replace("aux_loss", "load_balancing_loss") for kind in kinds]
    given = {"num_layers": num_layers, "force_initialize": True, "track_names": names, "total_loss_dict": losses}
    get_moe_metrics_tracker().report(1 / num_microbatches, 0, **given)
    return {name: float(loss) for name, loss in losses.items()}
