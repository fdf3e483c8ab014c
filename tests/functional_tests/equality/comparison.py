"""Our schedules against Megatron's own unsegmented run of the same model.

The reference has the whole model on one pipeline stage, with Megatron's own attention and schedule, and the same
tensor-parallel size: Megatron computes the cross entropy in fp32, which rounds differently when the vocabulary is cut.
Every data-parallel replica of the reference sees all micro-batches.
"""

import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isclose
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from functional_tests.equality.cases import Case, Layout
from functional_tests.equality.layout import build, groups_of, has_loss, replicas_of
from functional_tests.equality.models import SEQUENCE, VOCABULARY, Model
from functional_tests.equality.step import logged, run
from functional_tests.equality.suites import groups
from megatron.seq1f1b.model import host_memory, latents, loss_pieces
from megatron.seq1f1b.model.kernels.flash import CpuFlash
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.without_te import OUTPUT_LAYER
from megatron.seq1f1b.partition import balanced, packs_of_step
from megatron.seq1f1b.planning.costs.stage_costs import AnalyticTime
from megatron.seq1f1b.process.patches import Patch, patched
from megatron.seq1f1b.runtime import Packing, PipelineExecutor, Repacking, Segmentation
from megatron.seq1f1b.schedule import Kind, ScheduleChoice

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


class References:
    """Losses and gradients of Megatron's own runs of the unsegmented model on one pipeline stage."""

    def __init__(self) -> None:
        self._found = {}

    def of(self, model: Model, layout: Layout, cases: list[Case]) -> list[tuple]:
        """For each case: reports, gradients, logged auxiliary losses."""
        ranks = Layout(
            tensor=layout.tensor, sequence_parallel=layout.sequence_parallel, expert_tensor=layout.expert_tensor
        )
        cases = [replace(case, packed=case.packed and _form(model, ranks, case.packed)) for case in cases]
        model = plain(model)
        chunks = None
        found = []
        for case in cases:
            lengths = case.lengths if case.mask == "segment" else None
            key = model, ranks, case.m * replicas_of(layout), case.mask, lengths, case.packed, case.batch
            if key not in self._found:
                chunks = chunks or build(model, ranks)
                whole = replace(case, m=case.m * replicas_of(layout))
                self._found[key] = (
                    *run(forward_backward_no_pipelining, chunks, whole, 0, 1),
                    logged(whole.m, model.layers, model.auxiliary),
                )
            found.append(self._found[key])
        return found


def plain(model: Model) -> Model:
    """The model, of local layers that keep all their activations: one reference for every way to save memory."""
    config = tuple(entry for entry in model.config if not entry[0].startswith("recompute_"))
    without = {"transformer_engine": None, "recompute": None}
    return replace(model, config=config, **without, keeps_latents=False, keeps_attention=False, offloads=0.0)


def _form(model: Model, ranks: Layout, form: str) -> str:
    """In which form Megatron's own layers on a CPU are given documents that our segments get in another."""
    # Sequence parallelism takes no sequence of any length.
    if model.confuses_documents or form == "units" and not ranks.sequence_parallel:
        return "apart"
    # Only in the packed format do predictions stay within documents.
    return "rolls" if form == "cu_seqlens" and dict(model.config).get("mtp_num_layers") else "mask"


@dataclass(frozen=True)
class Verdict:
    """What one rank found in a case: the number of gradients, the largest relative error, and what is wrong."""

    gradients: int
    worst: float
    wrong: list[tuple[float, str]]


def patches_of(model: Model) -> list[Patch]:
    """What Megatron's recurrent layers compute in fp32 stays in fp64 where the model is in fp64: such rounding would
    hide what an exact model is to show. However small they are, losses are computed in pieces, multi-latent attention
    keeps latents if the model requires it, and storages move."""

    def unless_fp64(to_fp32):
        return lambda tensor: tensor if tensor.dtype == torch.float64 else to_fp32(tensor)

    patches = [Patch(f"{loss_pieces.__name__}.WORTH", 1, "chooses by size")]
    patches += [Patch("torch.Tensor.float", unless_fp64, "rounds", wraps=True)] * model.has_recurrent_layers
    patches += [Patch(f"{latents.__name__}.LARGEST_SHARE", inf, "chooses by size")] * model.keeps_latents
    return patches + [Patch(f"{host_memory.__name__}.SMALLEST", 1, "chooses by size")] * (model.offloads > 0)


@contextmanager
def counted_attention() -> Iterator[SimpleNamespace]:
    """Inside, `calls` counts the forwards of kernels of attention."""
    count = SimpleNamespace(calls=0)

    def counting(forward):
        def counted(kernel, *tensors):
            count.calls += 1
            return forward(kernel, *tensors)

        return counted

    kernels = (f"{kernel.__module__}.{kernel.__name__}.forward" for kernel in (CpuFlash, Unfused))
    with patched([Patch(name, counting, "counts", wraps=True) for name in kernels]):
        yield count


@contextmanager
def without_recomputation(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Inside, the layers keep all their activations."""
    modules = (module for chunk in chunks for module in chunk.modules())
    configs = [each.config for each in modules if hasattr(getattr(each, "config", None), "recompute_granularity")]
    for config in configs:
        config.recompute_granularity = None
    try:
        yield
    finally:
        for config in configs:
            config.recompute_granularity = "full"


def compare(
    references: References, model: Model, layout: Layout, cases: dict[str, Case]
) -> Iterator[tuple[str, Verdict]]:
    """Run the cases, consecutive steps of one model in one layout, and yield what this rank found in each."""
    expectations = references.of(model, layout, list(cases.values()))
    chunks = build(model, layout)
    first, replicas = parallel_state.get_data_parallel_rank(), replicas_of(layout)
    for (name, case), expected in zip(cases.items(), expectations, strict=True):
        expected_reports, expected_grads, expected_logs = expected
        cut = segmentation(case)
        piece = piece_of(case, layout)
        schedule = ScheduleChoice(case.family, layout.style)
        executor = PipelineExecutor(schedule, cut, piece=piece)
        step = partial(run, executor, chunks, first=first, step=replicas, groups=groups_of(layout))
        if model.offloads:
            executor.offload(model.offloads)
        if model.keeps_attention:
            executor.keep_attention()
        # An evaluation of fewer micro-batches, the training step, and an evaluation.
        evaluated, _ = step(case=replace(case, m=1), forward_only=True)
        with counted_attention() as kept:
            reports, grads = step(case=case)
        logs = logged(case.m, model.layers, model.auxiliary)
        evaluated_again, _ = step(case=case, forward_only=True)

        errors = {name: error(grad, expected_grads[name]) for name, grad in grads.items()}
        for got, wanted in (
            (evaluated, expected_reports[:replicas]),
            (reports, expected_reports),
            (evaluated_again, expected_reports),
        ):
            if case.packed == "units":
                got, wanted = in_all(got, wanted, layout)
            else:
                wanted = wanted[first::replicas] if has_loss(layout) else []
            if len(got) != len(wanted):
                errors[f"{len(got)} reports instead of {len(wanted)}"] = inf
            for microbatch, (mine, theirs) in enumerate(zip(got, wanted, strict=False)):
                errors[f"loss of micro-batch {microbatch}"] = error(mine["lm loss"], theirs["lm loss"])
        wrong = sorted((size, name) for name, size in errors.items() if not size <= TOLERANCE[model.dtype])
        if model.keeps_attention:
            with without_recomputation(chunks), counted_attention() as plain:
                _, plain_grads = step(case=case)
            logged(case.m, model.layers, model.auxiliary)  # and forgotten
            wrong += not_bitwise(grads, plain_grads)
            wrong += [(inf, f"{kept.calls} calls of kernels, not {plain.calls}")] * (kept.calls != plain.calls)
        if model.offloads:
            has_moved = Kind.OFFLOAD in {span.action.kind for span in executor.recorder.spans()}
            wrong += [(inf, "nothing moved")] * (has_moved != bool(executor._context.host_memory.most_bytes))
            executor = PipelineExecutor(schedule, cut, piece=piece)
            if model.keeps_attention:
                executor.keep_attention()
            _, plain_grads = run(executor, chunks, case, first, replicas, groups=groups_of(layout))
            logged(case.m, model.layers, model.auxiliary)  # and forgotten
            wrong += not_bitwise(grads, plain_grads)
        # Megatron keeps what it logs in fp32.
        wrong += [
            (logs[name] / value - 1, name)
            for name, value in expected_logs.items()
            if not isclose(logs[name], value, rel_tol=2e-6)
        ]
        yield name, Verdict(len(grads), max(errors.values(), default=0.0), wrong)


def not_bitwise(grads: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> list[tuple[float, str]]:
    return [(inf, f"{name}, not bitwise") for name, grad in grads.items() if not grad.equal(plain[name])]


def piece_of(case: Case, layout: Layout) -> int | None:
    """A fifth of the logits of a micro-batch on a rank: 11 tokens or less. A step of one micro-batch keeps them all."""
    return None if case.m == 1 else case.batch * SEQUENCE * VOCABULARY // (5 * layout.context * layout.tensor)


def segmentation(case: Case) -> Segmentation:
    """Where our run cuts its sequences."""

    def lengths(length: int) -> tuple[int, ...]:
        return case.lengths

    if case.packed == "units":

        def pack(found, replicas, alike):
            return packs_of_step(found, case.lengths[0], case.multiple, replicas, alike=alike)

        return Repacking(lengths, Packing(0), pack)
    return Segmentation(case.k, lengths, Packing(0, cut_by_documents(case)) if case.packed else None)


def in_all(got: list[dict], wanted: list[dict], layout: Layout) -> tuple[list[dict], list[dict]]:
    """Sums over all micro-batches and replicas: units are of other micro-batches than the reference has."""
    if not has_loss(layout):
        return got, []
    total = sum(report["lm loss"] for report in got)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return [{"lm loss": total}], [{"lm loss": sum(report["lm loss"] for report in wanted)}]


def cut_by_documents(case: Case):
    """For an executor: lengths that differ from one micro-batch to the next, if the case is split by documents."""
    if case.split != "documents":
        return None
    cost = AnalyticTime(per_token=1.0, per_pair=0.5)
    return lambda length, documents: balanced(length, case.k, cost, multiple_of=2, documents=documents)


def run_cases(names: Container[str]) -> None:
    """The cases of these names that have as many ranks as there are; rank 0 prints a line for each."""
    patched(OUTPUT_LAYER)  # as `install` does where Transformer Engine is there without apex
    references = References()
    for group in groups():
        cases = {name: case for name, case in group.cases.items() if name in names}
        if not cases or group.ranks != dist.get_world_size():
            continue
        with patched(patches_of(group.model)):
            for name, verdict in compare(references, group.model, group.layout, cases):
                found: list[Verdict] = [None] * dist.get_world_size()
                dist.all_gather_object(found, verdict)
                if dist.get_rank() == 0:
                    print(f"case {name}: {in_words(found)}", flush=True)


def in_words(verdicts: list[Verdict]) -> str:
    """Of all ranks."""
    wrong = [(rank, *each) for rank, verdict in enumerate(verdicts) for each in verdict.wrong]
    if not wrong:
        gradients, worst = sum(each.gradients for each in verdicts), max(each.worst for each in verdicts)
        return f"equal, {gradients} gradients, worst {worst:.1e}"
    rank, size, what = max(wrong, key=lambda each: each[1])
    return f"{len(wrong)} values differ, the worst by {size:.1e}: {what}, on rank {rank}"


def verdicts_in(log: str) -> dict[str, str]:
    """By the names of the cases."""
    return dict(re.findall(r"^case (\S+): (.*)$", log, re.MULTILINE))
