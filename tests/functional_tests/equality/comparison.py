"""Our schedules against Megatron's own unsegmented run of the same model.

The reference has the whole model on one pipeline stage, with Megatron's own attention and schedule, and the same
tensor-parallel size: Megatron computes the cross entropy in fp32, which rounds differently when the vocabulary is cut.
"""

import gc
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf, isclose

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.pipeline_parallel.utils import ScheduleNode

from functional_tests.equality.cases import Case, Layout
from functional_tests.equality.layout import build, groups_of, has_loss, replicas_of, use_ranks
from functional_tests.equality.models import SEQUENCE, VOCABULARY, Model
from functional_tests.equality.step import logged, run
from functional_tests.equality.suites import groups
from megatron.seq1f1b.costs.stage_costs import AnalyticTime
from megatron.seq1f1b.model import HostMemory
from megatron.seq1f1b.model.attention import latents
from megatron.seq1f1b.model.kernels.flash import CpuFlash
from megatron.seq1f1b.model.kernels.unfused import Unfused
from megatron.seq1f1b.model.memory import loss_pieces, storages
from megatron.seq1f1b.partition import balanced, packs_of_step
from megatron.seq1f1b.platform.without_te import OUTPUT_LAYER
from megatron.seq1f1b.process.patches import Patch, patched
from megatron.seq1f1b.runtime import ActivationMemory, PipelineExecutor, Repacking, Segmentation
from megatron.seq1f1b.schedule import COMPUTE_KINDS, Kind, ScheduleChoice, Shape

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


class References:
    """Losses and gradients of Megatron's own runs of the unsegmented model on one pipeline stage.

    Each replica makes a part of the runs by itself, with all their micro-batches, and gets the others' results.
    """

    def __init__(self) -> None:
        self._found = {}

    def of(self, model: Model, layout: Layout, cases: Iterable[Case]) -> list[tuple]:
        """For each case: reports, gradients, logged auxiliary losses."""
        ranks = Layout(
            tensor=layout.tensor, sequence_parallel=layout.sequence_parallel, expert_tensor=layout.expert_tensor
        )
        whole = plain(model)
        runs = [(whole, ranks, _unsegmented(case, model, ranks, replicas_of(layout))) for case in cases]
        missing = [each for each in dict.fromkeys(runs) if each not in self._found]
        if missing:
            use_ranks(ranks)
            replicas = parallel_state.get_data_parallel_group()
            first = (replicas.rank() + len(self._found)) % replicas.size()  # in turn, since there is often one alone
            parts: list[dict] = [{}] * replicas.size()
            with patched(each_replica_alone()):
                chunks = build(whole, ranks)
                part = {}
                for each in missing[first :: replicas.size()]:
                    case = each[-1]
                    step = run(forward_backward_no_pipelining, chunks, case, 0, 1)
                    part[each] = *step, logged(case.m, whole.layers, whole.auxiliary)
            dist.all_gather_object(parts, part, group=replicas)
            for each in parts:
                self._found |= each
        return [self._found[each] for each in runs]


def _unsegmented(case: Case, model: Model, ranks: Layout, replicas: int) -> Case:
    """The step of all replicas together, without what only segments have."""
    packed = case.packed and _form(model, ranks, case.packed)
    if case.mask != "segment":
        case = replace(case, k=1, split="even", multiple=1)
    return replace(case, family="", m=case.m * replicas, packed=packed)


def each_replica_alone() -> list[Patch]:
    """Takes data parallelism out of Megatron's groups, of which there are no others than tensor-parallel ones here."""
    tensor, own = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    return [
        Patch(f"{parallel_state.__name__}.{name}", tensor if "TENSOR" in name else own, "a replica runs by itself")
        for name, group in vars(parallel_state).items()
        if "DATA_PARALLEL_GROUP" in name and group is not None and parallel_state.get_data_parallel_world_size() > 1
    ]


def plain(model: Model) -> Model:
    """The model, of local layers that keep all their activations: one reference for every way to save memory."""
    config = tuple(entry for entry in model.config if not entry[0].startswith("recompute_"))
    without = {"transformer_engine": None, "recompute": None}
    without |= {"keeps_latents": False, "keeps_attention": False, "offloads": 0.0, "layers_leaving": 0, "pairs": False}
    return replace(model, config=config, **without)


def _form(model: Model, ranks: Layout, form: str) -> str:
    """In which form Megatron's own layers on a CPU are given documents that our segments get in another."""
    # Sequence parallelism takes no sequence of any length.
    if model.confuses_documents or (form == "units" and not ranks.sequence_parallel):
        return "apart"
    # Only in the packed format do predictions stay within documents.
    return "rolls" if form == "cu_seqlens" and dict(model.config).get("mtp_num_layers") else "mask"


def patches_of(model: Model) -> list[Patch]:
    """What Megatron's recurrent layers compute in fp32 stays in fp64 where the model is in fp64: such rounding would
    hide what an exact model is to show. However small they are, losses are computed in pieces, multi-latent attention
    keeps latents if the model requires it, and storages move."""

    def unless_fp64(to_fp32):
        return lambda tensor: tensor if tensor.dtype == torch.float64 else to_fp32(tensor)

    patches = [Patch(f"{loss_pieces.__name__}.MOST_PIECES_KEPT", 1, "chooses by size")]
    patches += [Patch("torch.Tensor.float", unless_fp64, "rounds", wraps=True)] * model.has_recurrent_layers
    patches += [Patch(f"{latents.__name__}.LARGEST_SHARE", inf, "chooses by size")] * model.keeps_latents
    return patches + [Patch(f"{storages.__name__}.SMALLEST", 1, "chooses by size")] * (model.offloads > 0)


@contextmanager
def counted_attention() -> Iterator[list]:
    """Inside, the list grows by one with every forward of a kernel of attention."""
    calls = []

    def counting(forward):
        def counted(*given):
            calls.append(None)
            return forward(*given)

        return counted

    kernels = (f"{kernel.__module__}.{kernel.__name__}.forward" for kernel in (CpuFlash, Unfused))
    with patched([Patch(name, counting, "counts", wraps=True) for name in kernels]):
        yield calls


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, only what nothing refers to is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compare(references: References, model: Model, layout: Layout, cases: Iterable[Case]) -> Iterator[dict[str, float]]:
    """Run the cases, consecutive steps of one model in one layout; of each, the relative errors of all that this rank
    finds, by name, infinite for what is wrong in another way."""
    expectations = references.of(model, layout, cases)
    chunks = build(model, layout)
    first, replicas = parallel_state.get_data_parallel_rank(), replicas_of(layout)
    step = partial(run, chunks=chunks, first=first, step=replicas, groups=groups_of(layout))
    for case, (expected, expected_grads, expected_logs) in zip(cases, expectations, strict=True):
        choice = ScheduleChoice(case.family, layout.style, pairs=model.pairs)
        # A fifth of the logits of a micro-batch on a rank: 11 tokens or less. A step of one micro-batch keeps them all.
        piece = None if case.m == 1 else case.batch * SEQUENCE * VOCABULARY // (5 * layout.context * layout.tensor)
        usual = PipelineExecutor(choice, segmentation(case), activations=ActivationMemory(loss_piece=piece))
        activations = ActivationMemory(
            loss_piece=piece,
            keeps_attention=model.keeps_attention,
            offloads=model.offloads,
            host_memory=HostMemory(model.layers_leaving),
        )
        executor = PipelineExecutor(choice, segmentation(case), activations=activations)
        evaluated, _ = step(executor, case=replace(case, m=1), forward_only=True)
        with counted_attention() as calls, without_collector():
            reports, grads = step(executor, case=case)
            left = [each for each in gc.get_objects() if isinstance(each, ScheduleNode)]
        logs = logged(case.m, model.layers, model.auxiliary)
        evaluated_again, _ = step(executor, case=case, forward_only=True)

        errors = {name: error(grad, expected_grads[name]) for name, grad in grads.items()}
        for what, got, wanted in (
            ("the evaluation of one", evaluated, expected[:replicas]),
            ("the step", reports, expected),
            ("the evaluation", evaluated_again, expected),
        ):
            if case.packed == "units":
                got, wanted = in_all(got, wanted, layout)
            else:
                wanted = wanted[first::replicas] if has_loss(layout) else []
            if len(got) != len(wanted):
                errors[f"{len(got)} reports of {what} instead of {len(wanted)}"] = inf
            for microbatch, (mine, theirs) in enumerate(zip(got, wanted, strict=False)):
                errors[f"loss of micro-batch {microbatch} in {what}"] = error(mine["lm loss"], theirs["lm loss"])
        for name, value in expected_logs.items():
            if not isclose(logs[name], value, rel_tol=2e-6):  # Megatron keeps what it logs in fp32
                errors[name] = inf
        if left:
            errors[f"{len(left)} nodes of plans are left to the garbage collector"] = inf
        if model.pairs and case.packed != "units":
            errors |= dict.fromkeys(wrong_number_of_pairs(executor, choice, case, layout), inf)
        if model.offloads:
            has_moved = Kind.OFFLOAD in {span.action.kind for span in executor.recorder.spans()}
            if has_moved != bool(executor.context.host_memory.most_bytes):
                errors["nothing moved"] = inf
        if model.offloads or model.keeps_attention:
            with counted_attention() as usual_calls:
                _, usual_grads = step(usual, case=case)
            logged(case.m, model.layers, model.auxiliary)  # and forgotten
            errors |= {f"{name}, not bitwise": inf for name, grad in grads.items() if not grad.equal(usual_grads[name])}
            if model.keeps_attention and 0 < len(usual_calls) <= len(calls):
                errors[f"{len(calls)} calls of kernels, {len(usual_calls)} where none is kept"] = inf
        yield errors


def wrong_number_of_pairs(
    executor: PipelineExecutor, choice: ScheduleChoice, case: Case, layout: Layout
) -> Iterator[str]:
    """What is wrong, if not as many forwards as planned ran beside a backward on this rank."""
    clock = choice.resolve(Shape(layout.placement, case.m, case.k), case.lengths, None)
    wanted = len(clock.pairs_in(clock.order(parallel_state.get_pipeline_model_parallel_rank())))
    computing = [span for span in executor.recorder.spans() if span.action.kind in COMPUTE_KINDS]
    found = sum(after.start < before.end for before, after in pairwise(computing))
    if found != wanted:
        yield f"{found} pairs instead of {wanted}"


def segmentation(case: Case) -> Segmentation:
    """Where our run cuts its sequences."""

    def lengths(length, documents=None, number=None):
        rows = length // SEQUENCE  # one behind the other in the packed format
        if documents is None or case.split != "documents":
            return [each * rows for each in case.lengths]
        # They differ from one micro-batch to the next.
        cost = AnalyticTime(per_token=1.0, per_pair=0.5)
        return balanced(length, case.k, cost, multiple_of=2, documents=documents)

    def pack(found, replicas, equal_counts):
        return packs_of_step(found, case.lengths[0], case.multiple, replicas, equal_counts=equal_counts)

    if case.packed == "units":
        return Repacking(pack, end_of_document=0)
    return Segmentation(case.k, lengths, packed=bool(case.packed), end_of_document=0)


def in_all(got: list[dict], wanted: list[dict], layout: Layout) -> tuple[list[dict], list[dict]]:
    """Sums over all micro-batches and replicas: units are of other micro-batches than the reference has."""
    if not has_loss(layout):
        return got, []
    total = sum(report["lm loss"] for report in got)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return [{"lm loss": total}], [{"lm loss": sum(report["lm loss"] for report in wanted)}]


def run_cases(names: Container[str]) -> None:
    """The cases of these names that have as many ranks as there are; rank 0 prints a line for each."""
    patched(OUTPUT_LAYER)  # as `install` does where Transformer Engine is there without apex
    references = References()
    for group in groups():
        cases = {name: case for name, case in group.cases.items() if name in names}
        if not cases or group.ranks != dist.get_world_size():
            continue
        with patched(patches_of(group.model)):
            found = compare(references, group.model, group.layout, cases.values())
            for name, errors in zip(cases, found, strict=True):
                of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
                dist.all_gather_object(of_ranks, errors)
                if dist.get_rank() == 0:
                    print(f"case {name}: {in_words(of_ranks, TOLERANCE[group.model.dtype])}", flush=True)


def in_words(of_ranks: list[dict[str, float]], tolerance: float) -> str:
    """A verdict on the errors of all ranks."""
    found = [(size, f"{name}, on rank {rank}") for rank, errors in enumerate(of_ranks) for name, size in errors.items()]
    wrong = [(size, what) for size, what in found if not size <= tolerance]
    size, what = max(wrong or found)
    if wrong:
        return f"{len(wrong)} of {len(found)} values differ, the worst by {size:.1e}: {what}"
    return f"equal, {len(found)} values, worst {size:.1e}"
