"""One training step of our schedules against Megatron's own unsegmented run: losses and every gradient.

Started on several ranks with `--suite`, it compares a matrix of cases in one process group. The reference has the whole
model on one pipeline stage, with Megatron's own attention and schedule, and the same tensor-parallel size: Megatron
computes the cross entropy in fp32, which rounds differently when the vocabulary is cut. Every data-parallel replica of
the reference sees all micro-batches.
"""

import argparse
import itertools
import zlib
from dataclasses import dataclass, replace
from functools import partial
from math import isclose

import torch
import torch.distributed as dist

from megatron.seq1f1b import cpu

cpu.activate()

from equality_experts import logged, set_biases  # noqa: E402
from equality_models import SEQUENCE, VOCABULARY, Model, balanced, latent, mixture, positions, variants  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from megatron.seq1f1b.costs import AnalyticTime  # noqa: E402
from megatron.seq1f1b.partition import balanced_by_documents, even  # noqa: E402
from megatron.seq1f1b.runtime import Packing, PipelineExecutor  # noqa: E402
from megatron.seq1f1b.schedule import FAMILY_NAMES, Placement  # noqa: E402

BATCH, END = 2, 6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Layout:
    """How it is cut over ranks; what is left of the ranks is data parallel."""

    pipeline: int = 1
    chunks: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int | None = None
    overlap: bool = False
    align: bool = False
    distributed_optimizer: bool = False
    style: str = "looped"

    @property
    def placement(self) -> Placement:
        return Placement(self.pipeline, self.chunks, self.style)


@dataclass(frozen=True)
class Case:
    """One step. Where sequences are `packed`, it says how a batch tells of documents."""

    family: str
    k: int
    m: int
    split: str
    mask: str
    packed: str | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        if self.split in ("even", "documents"):
            return even(SEQUENCE, self.k, 2)
        shrinking = [2 * (self.k - i) for i in range(self.k)]  # uneven, and even numbers for two tensor ranks
        return (SEQUENCE - sum(shrinking[1:]), *shrinking[1:])


def use_ranks(layout: Layout) -> None:
    """Give the ranks their parts; keeps the process groups if they are the right ones, ends them if not.

    Megatron only forgets its groups, but each of gloo's costs threads that wake up a hundred times a second.
    """
    sizes = layout.tensor, layout.pipeline, layout.chunks if layout.chunks > 1 else None, layout.expert
    sizes += (layout.expert_tensor or layout.tensor,)
    if parallel_state.model_parallel_is_initialized():
        now = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        if now == sizes:
            return
        for group in filter(None, parallel_state._global_process_group_list):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
    tensor, pipeline, chunks, expert, expert_tensor = sizes
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    model_parallel_cuda_manual_seed(1)


def build(model: Model, layout: Layout) -> list[torch.nn.Module]:
    """The model chunks of this rank; every parameter has the same values in every layout."""
    use_ranks(layout)
    config = model.transformer_config(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    config.finalize_model_grads_func = finalize_v if layout.style == "v" else finalize_model_grads
    chunks = []
    for chunk in range(layout.chunks):
        stage = layout.placement.stage_of(parallel_state.get_pipeline_model_parallel_rank(), chunk)
        is_last = stage == layout.pipeline * layout.chunks - 1
        number = chunk if layout.chunks > 1 else None
        chunks.append(model.build(config, stage == 0, is_last, number, groups_of(layout, stage)))
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


class Depth:
    """Stands for the pipeline group while Megatron builds a chunk: which of its layers they are follows from `rank`."""

    def __init__(self, stage: int, size: int) -> None:
        self._rank, self._size = stage % size, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def groups_of(layout: Layout, stage: int | None = None) -> ProcessGroupCollection | None:
    """Megatron's groups; of the ranks of a V no two share an embedding, and their chunks lie as deep as their stage."""
    if layout.style == "looped":
        return None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.embd = groups.pos_embd = groups.cp  # of this rank alone
    if stage is not None:
        groups.pp = Depth(stage, layout.pipeline)
    return groups


def finalize_v(chunks, *args, **kwargs) -> None:
    """In a V rank 0 has the embedding and the output layer, so tied ones are summed there."""
    finalize_model_grads(chunks, *args, **kwargs)
    first, last = chunks[0].module, chunks[-1].module
    if first.pre_process and first.share_embeddings_and_output_weights:
        embedding, output = (model.shared_embedding_or_output_weight().main_grad for model in (first, last))
        embedding += output
        output.copy_(embedding)


def _bare_if_one(hooks: list):
    return hooks[0] if len(hooks) == 1 else hooks


def named(chunks):
    """(name in the whole model, parameter) of the chunks of this rank; bare or wrapped."""
    for chunk in chunks:
        chunk = getattr(chunk, "module", chunk)
        for name, param in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                if rest.startswith("mlp.experts.local_experts."):
                    rest = _of_all_experts(rest, chunk.decoder.layers[int(local)].mlp.local_expert_indices)
                name = f"decoder.layers.{chunk.decoder.layers[int(local)].layer_number - 1}.{rest}"
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield name, param


def _of_all_experts(name: str, indices: list[int]) -> str:
    *path, local, linear, parameter = name.split(".")
    return ".".join((*path, str(indices[int(local)]), linear, parameter))


def initial(name: str, param: torch.Tensor) -> torch.Tensor:
    """Weights large enough that attention is far from uniform; replicated parameters are the same on every rank."""
    shard = 0
    if getattr(param, "tensor_model_parallel", False):
        of_experts = "local_experts" in name
        get_rank = (
            parallel_state.get_expert_tensor_parallel_rank
            if of_experts
            else parallel_state.get_tensor_model_parallel_rank
        )
        shard = get_rank()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {shard}".encode()))
    noise = torch.randn(param.shape, generator=generator)
    return (noise if param.dim() > 1 else 1 + noise / 4 if name.endswith("norm.weight") else noise / 4) * 0.5


def batches(case: Case, first: int, step: int):
    """Micro-batches `first`, `first + step`, … of random tokens; `mask` zeroes some, or all of one segment."""
    for microbatch in range(first, case.m * step, step):
        generator = torch.Generator().manual_seed(100 + microbatch)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        loss_mask = torch.ones(BATCH, SEQUENCE)
        if case.mask == "random":
            loss_mask = (torch.rand(BATCH, SEQUENCE, generator=generator) < 0.3 + 0.2 * microbatch).float()
        elif case.mask == "segment":
            start = sum(case.lengths[: microbatch % case.k])
            loss_mask[:, start : start + case.lengths[microbatch % case.k]] = 0 if case.k > 1 else 1
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": loss_mask,
            "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1),
        }
        yield batch | packed(tokens[:, :-1], case.packed) if case.packed else batch


def packed(tokens: torch.Tensor, form: str) -> dict:
    """Entries of a batch with several documents, each ended by a token below END: positions within them, and a mask or
    cumulative lengths."""
    tokens = torch.where(tokens < END, 0, tokens)
    starts = torch.nn.functional.pad(tokens[:, :-1] == 0, (1, 0), value=True)
    documents = starts.cumsum(dim=1)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    entries = {"tokens": tokens, "position_ids": positions - torch.where(starts, positions, 0).cummax(dim=1).values}
    if form == "mask":
        sees = (documents[:, :, None] == documents[:, None, :]).tril()
        entries["attention_mask"] = ~sees[:, None]
    elif form == "cu_seqlens":
        bounds = torch.where(starts, positions, SEQUENCE).sort(dim=1).values
        entries["cu_seqlens"] = torch.nn.functional.pad(bounds, (0, 1), value=SEQUENCE).int()
        entries["max_seqlen"] = entries["cu_seqlens"].diff(dim=1).max(dim=1).values
    return entries


def forward_step(data_iterator, model):
    """Like pretrain_gpt.py's, with the loss summed in fp64."""
    module = model.module
    batch = next(data_iterator) if module.pre_process or module.post_process else {}
    packing = {}
    if "cu_seqlens" in batch:
        bounds, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"].max())
        packing["packed_seq_params"] = PackedSeqParams("thd", bounds, bounds, None, None, longest, longest)
    inputs = (batch.get(name) for name in ("tokens", "position_ids", "attention_mask"))
    output = model(*inputs, labels=batch.get("labels"), **packing)

    def loss_func(losses):
        mask = batch["loss_mask"].double()
        loss, count = (losses.double() * mask).sum(), mask.sum().int()
        return loss, count, {"lm loss": torch.stack([loss.detach(), count.double()])}

    return output, loss_func


def run(schedule, chunks, case: Case, first: int, step: int, forward_only: bool = False, groups=None):
    """Reports and gradients by name of one step, biases of experts too; no gradients where `forward_only`."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    biases = set_biases(chunks)
    num_microbatches = len(range(first, case.m * step, step))
    with torch.set_grad_enabled(not forward_only):
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=[batches(case, first, step) for _ in chunks],
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            pg_collection=groups,
        )
    if not forward_only:
        gather_sharded_gradients(chunks)
    gradients = {name: param.main_grad for name, param in named(chunks)}
    return reports, {name: tensor.clone() for name, tensor in (gradients | biases).items()}


def gather_sharded_gradients(chunks) -> None:
    """With the distributed optimizer a rank has its shard of each bucket reduced; the other shards come from theirs."""
    for bucket in (bucket for chunk in chunks for group in chunk.bucket_groups for bucket in group.buckets):
        if chunks[0].ddp_config.use_distributed_optimizer:
            group = parallel_state.get_data_parallel_group()
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300)).item()


class References:
    """Losses and gradients of Megatron's own runs of the unsegmented model on one pipeline stage."""

    def __init__(self) -> None:
        self._found = {}

    def of(self, model: Model, layout: Layout, cases: list[Case]) -> list[tuple]:
        """(reports of training, gradients, logged auxiliary losses, reports of evaluation) for each case."""
        ranks = Layout(
            tensor=layout.tensor,
            sequence_parallel=layout.sequence_parallel,
            expert_tensor=layout.expert_tensor,
        )
        cases = [replace(case, packed=case.packed and "mask") for case in cases]
        chunks = None
        found = []
        for case in cases:
            key = model, ranks, case.m, case.mask, case.lengths if case.mask == "segment" else None, case.packed
            if key not in self._found:
                chunks = chunks or build(model, ranks)
                whole = replace(case, m=case.m * replicas_of(layout))
                self._found[key] = (
                    *run(forward_backward_no_pipelining, chunks, whole, 0, 1),
                    logged(whole.m, model.layers, model.auxiliary),
                    run(forward_backward_no_pipelining, chunks, whole, 0, 1, forward_only=True)[0],
                )
            found.append(self._found[key])
        return found


def replicas_of(layout: Layout) -> int:
    return dist.get_world_size() // (layout.pipeline * layout.tensor)


def compare(references: References, model: Model, layout: Layout, cases: list[Case]) -> tuple[int, float]:
    """Check all cases of one model in one layout; number of gradients compared and the largest relative error.

    The cases are consecutive steps of one model.
    """
    expectations = references.of(model, layout, cases)
    chunks = build(model, layout)
    first, replicas = parallel_state.get_data_parallel_rank(), replicas_of(layout)
    worst, checked = 0.0, 0
    for case, expected in zip(cases, expectations, strict=True):
        expected_reports, expected_grads, expected_logs, expected_evaluation = expected
        packing = Packing(0, cut_by_documents(case)) if case.packed else None
        executor = PipelineExecutor(
            case.family,
            case.k,
            lambda length, case=case: case.lengths,
            packing=packing,
            placement=layout.style,
        )
        step = partial(run, executor, chunks, case, first, replicas, groups=groups_of(layout))
        evaluations = [step(forward_only=True)[0]]
        reports, grads = step()
        logs = logged(case.m, model.layers, model.auxiliary)
        evaluations.append(step(forward_only=True)[0])

        errors = {name: error(grad, expected_grads[name]) for name, grad in grads.items()}
        checked += len(errors)
        if has_loss(layout):
            for got, expected in (
                (reports, expected_reports),
                *((evaluation, expected_evaluation) for evaluation in evaluations),
            ):
                for microbatch, (mine, theirs) in enumerate(zip(got, expected[first::replicas], strict=True)):
                    errors[f"loss of micro-batch {microbatch}"] = error(mine["lm loss"], theirs["lm loss"])
        else:
            assert reports == [] and evaluations == [[], []]
        worst = max(worst, *errors.values())
        wrong = sorted((size, name) for name, size in errors.items() if not size <= TOLERANCE[model.dtype])
        # Megatron keeps what it logs in fp32.
        wrong += [
            (logs[name] / value - 1, name)
            for name, value in expected_logs.items()
            if not isclose(logs[name], value, rel_tol=2e-6)
        ]
        assert not wrong, f"{layout} {model} {case}: {len(wrong)} of {len(errors)} differ, the worst by {wrong[-1]}"
    return checked, worst


def cut_by_documents(case: Case):
    """For an executor: lengths that differ from one micro-batch to the next, if the case is split by documents."""
    if case.split != "documents":
        return None
    cost = AnalyticTime(per_token=1.0, per_pair=0.5)
    return lambda length, documents: balanced_by_documents(length, case.k, cost, documents, multiple_of=2)


def has_loss(layout: Layout) -> bool:
    """Whether this rank holds the last stage."""
    last = layout.placement.num_stages - 1
    return parallel_state.get_pipeline_model_parallel_rank() == layout.placement.rank_of(last)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", choices=SUITES, required=True)
    dist.init_process_group("gloo")
    suite = parser.parse_args().suite
    references = References()
    for model, layout, cases in SUITES[suite]():
        checked, worst = compare(references, model, layout, cases)
        if dist.get_rank() == 0:
            print(f"equal: {layout} {model}: {len(cases)} cases, {checked} gradients, worst {worst:.1e}", flush=True)


def all_cases(families=("1f1b",)):
    return [
        Case(family, k, m, split, mask)
        for family, k, m, split, mask in itertools.product(
            families, (1, 2, 3, 4, 7), (1, 2, 5), ("even", "uneven"), ("ones", "random", "segment")
        )
        if k > 1 or (split, mask) in (("even", "ones"), ("even", "random"))
    ]


def few_cases(families=("1f1b",)):
    """One of each kind."""
    return [
        *(Case(family, k, m, "uneven", "random") for family in families for k, m in ((1, 2), (2, 1), (3, 5), (7, 2))),
        *(Case(family, 4, 2, "even", "segment") for family in families),
    ]


def pipeline_suite(size: int):
    yield Model(), Layout(pipeline=size), all_cases()
    for model in variants():
        yield model, Layout(pipeline=size), few_cases()


def tensor_suite(pipeline: int):
    for sequence_parallel in (False, True):
        layout = Layout(pipeline=pipeline, tensor=2, sequence_parallel=sequence_parallel)
        yield Model(), layout, few_cases()
        yield Model(kv_heads=2, positions="learned_absolute", tied=True), layout, few_cases()


def order_cases(families):
    """Sizes that orders of actions stumble over: fewer micro-batches than ranks, no multiple of them, odd segments."""
    return [
        Case(family, k, m, "uneven", "random")
        for family, k, m in itertools.product(families, (1, 2, 3, 5), (1, 2, 5))
    ]


def families_suite():
    yield Model(), Layout(pipeline=2), order_cases(("gpipe", "breadth-first"))
    yield Model(layers=4), Layout(pipeline=2, chunks=2), order_cases(("1f1b",)) + few_cases(("gpipe", "breadth-first"))


def chunks_suite(pipeline: int, chunks: int):
    model, layout = Model(layers=pipeline * chunks), Layout(pipeline=pipeline, chunks=chunks)
    yield model, layout, order_cases(("1f1b",)) + few_cases(("gpipe", "breadth-first"))
    yield replace(model, tied=True, positions="learned_absolute", recompute="full"), layout, few_cases()


def split_suite():
    families = ("zb-h1", "auto")
    yield Model(), Layout(pipeline=2), order_cases(families)
    for model in variants()[1:]:
        yield model, Layout(pipeline=2), few_cases(("zb-h1",))
    yield Model(), Layout(pipeline=2, chunks=2), few_cases(families)


def split_tensor_suite():
    for model, sequence_parallel in ((Model(), True), (variants()[1], False), (variants()[1], True)):
        yield model, Layout(pipeline=2, tensor=2, sequence_parallel=sequence_parallel), few_cases(("zb-h1",))


def v_suite(pipeline: int):
    """Every second chunk runs back, so that the first rank has the loss."""
    model, layout = Model(layers=2 * pipeline), Layout(pipeline=pipeline, chunks=2, style="v")
    if pipeline == 2:
        yield model, layout, order_cases(("1f1b", "auto")) + few_cases(FAMILY_NAMES)
    else:
        yield model, layout, few_cases(("1f1b", "zb-h1", "auto"))
    for variant in ({"per_token_loss": True}, {"tied": True, "positions": "learned_absolute", "recompute": "full"}):
        yield replace(model, **variant), layout, few_cases(("1f1b", "auto"))


def v_overlap_suite():
    for variant in ({}, {"distributed_optimizer": True}):
        layout = replace(Layout(pipeline=2, chunks=2, style="v", overlap=True), **variant)
        for family in ("1f1b", "auto"):
            yield Model(per_token_loss=family == "auto"), layout, consecutive_cases(family)


def consecutive_cases(family):
    return [Case(family, k, m, "even", "random") for k, m in ((2, 2), (1, 1), (3, 1))]


def overlap_suite():
    """The cases of a model are consecutive steps, of one unit or several; in the first DDP learns what to wait for."""
    for chunks, family in ((1, "1f1b"), (1, "zb-h1"), (2, "1f1b"), (2, "zb-h1"), (2, "breadth-first")):
        layout = Layout(pipeline=2, chunks=chunks, overlap=True)
        for variant in ({}, {"distributed_optimizer": True}, {"align": True}):
            model = Model(tied=True, positions="learned_absolute")
            yield model, replace(layout, **variant), consecutive_cases(family)


def documents_suite():
    """Each way to tell of documents, and one step of each kind in each model."""
    cases = [
        Case("1f1b", k, m, split, "random", form)
        for k, m, split, form in (
            (1, 2, "even", "mask"),
            (1, 2, "even", "tokens"),
            (2, 2, "uneven", "cu_seqlens"),
            (3, 2, "documents", "tokens"),
            (4, 2, "uneven", "mask"),
            (5, 5, "documents", "cu_seqlens"),
            (7, 2, "uneven", "cu_seqlens"),
        )
    ]
    yield Model(), Layout(pipeline=2), cases
    for model in (*variants(), latent(), mixture()):
        yield model, Layout(pipeline=2), cases[1:4]
    yield Model(), Layout(pipeline=2), [replace(case, family="zb-h1") for case in cases[3:6]]


def data_suite(pipeline: int):
    for model in (Model(), variants()[1]):
        yield model, Layout(pipeline=pipeline), few_cases()


def latent_suite():
    """Multi-latent attention."""
    layout, exact = Layout(pipeline=2), latent()
    recomputed = replace(exact, recompute="selective")
    yield exact, layout, few_cases(("1f1b", "zb-h1"))
    yield latent("rope", query_rank=None), layout, few_cases()
    yield replace(exact, recompute="full"), layout, few_cases()
    yield recomputed, layout, few_cases(("zb-h1",))
    yield recomputed.with_config(recompute_modules=("mla_up_proj",)), layout, few_cases(("zb-h1",))
    yield replace(exact, dtype=torch.float32, per_token_loss=True), layout, few_cases()


def latent_tensor_suite():
    for sequence_parallel in (False, True):
        yield latent(), Layout(tensor=2, sequence_parallel=sequence_parallel), few_cases()
    yield latent("rope", query_rank=None), Layout(tensor=2, sequence_parallel=True), few_cases(("zb-h1",))


SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_token_dispatcher_type": "alltoall"}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def experts_suite():
    """Mixtures of experts."""
    layout, shared = Layout(pipeline=2), mixture(**SHARED, moe_layer_freq=(0, 1))
    recomputed = replace(shared, recompute="selective").with_config(recompute_modules=("moe", "core_attn"))
    yield mixture(), layout, few_cases(("1f1b", "zb-h1"))
    yield shared, layout, few_cases(("zb-h1",))
    yield replace(shared, recompute="full"), layout, few_cases()
    yield recomputed, layout, few_cases(("zb-h1",))
    # A sigmoid in fp32, as Megatron takes it in models of any precision, rounds by the place in its tensor.
    yield replace(mixture(**BIASED), dtype=torch.float32), layout, few_cases()


def router_losses_suite():
    layout, everything = Layout(pipeline=2), balanced("aux_loss", "seq_aux_loss", moe_z_loss_coeff=0.1)
    yield everything, layout, few_cases(("zb-h1",))
    yield replace(everything, per_token_loss=True), layout, few_cases()
    yield replace(everything, recompute="full"), layout, few_cases()


def latent_experts_suite():
    """Both together, in chunks, on packed documents."""
    model = replace(latent(), layers=4).with_config(**dict(balanced("aux_loss", moe_layer_freq=(0, 1, 1, 1)).config))
    cases = few_cases(("1f1b", "breadth-first"))
    forms = ("mask", "tokens", "cu_seqlens")
    packed = [replace(case, packed=form) for case, form in zip(cases[:3], forms, strict=True)]
    yield model, Layout(pipeline=2, chunks=2), cases + packed


def global_balance_suite():
    """On one rank: the counts of the reference's replicas, which all see the same tokens, would add up."""
    for recompute in (None, "full"):
        yield replace(balanced("global_aux_loss"), recompute=recompute), Layout(), few_cases()


def expert_parallel_suite(layout: Layout):
    for dispatcher, family in (("allgather", "1f1b"), ("alltoall", "zb-h1")):
        model = balanced("aux_loss", moe_z_loss_coeff=0.1, moe_token_dispatcher_type=dispatcher)
        yield model, layout, few_cases((family,))


def experts_tensor_suite():
    layout = Layout(tensor=2, sequence_parallel=True)
    model = balanced("aux_loss", "seq_aux_loss", moe_z_loss_coeff=0.1)
    yield model, layout, few_cases(("zb-h1",))
    model = replace(model, per_token_loss=True).with_config(moe_token_dispatcher_type="alltoall")
    yield model, replace(layout, expert=2, expert_tensor=1), few_cases()


SUITES = {
    "pp1": lambda: pipeline_suite(1),
    "pp2": lambda: pipeline_suite(2),
    "pp4": lambda: pipeline_suite(4),
    "pp2-families": families_suite,
    "pp2-chunks3": lambda: chunks_suite(2, 3),
    "pp4-chunks2": lambda: chunks_suite(4, 2),
    "pp2-split": split_suite,
    "pp4-split": lambda: [(Model(), Layout(pipeline=4), order_cases(("zb-h1", "auto")))],
    "pp2-tp2-split": split_tensor_suite,
    "pp2-dp2-overlap": overlap_suite,
    "pp2-v": lambda: v_suite(2),
    "pp4-v": lambda: v_suite(4),
    "pp2-dp2-v": v_overlap_suite,
    "tp2": lambda: tensor_suite(1),
    "pp2-tp2": lambda: tensor_suite(2),
    "pp2-documents": documents_suite,
    "pp2-tp2-documents": lambda: [
        (variants()[1], Layout(2, 1, 2, True), [Case("1f1b", 4, 2, "documents", "random", "tokens")]),
    ],
    "pp2-positions": lambda: [(model, Layout(pipeline=2), few_cases()) for model in positions()],
    "pp2-mla": latent_suite,
    "tp2-mla": latent_tensor_suite,
    "pp2-moe": experts_suite,
    "pp2-moe-losses": router_losses_suite,
    "pp2-mla-moe": latent_experts_suite,
    "pp1-moe-global": global_balance_suite,
    "dp2-moe": lambda: expert_parallel_suite(Layout(expert=2)),
    "pp2-dp2-moe": lambda: expert_parallel_suite(
        Layout(pipeline=2, expert=2, overlap=True, distributed_optimizer=True)
    ),
    "tp2-moe": experts_tensor_suite,
    "dp2": lambda: data_suite(1),
    "pp2-dp2": lambda: data_suite(2),
}

if __name__ == "__main__":
    main()
