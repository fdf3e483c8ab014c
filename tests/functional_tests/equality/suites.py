"""The matrix of cases, in suites: (model, layout, consecutive steps of the model in this layout)."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from functional_tests.equality.cases import Case, Layout
from functional_tests.equality.models import Model, balanced, hybrid, latent, mixture, positions, variants
from megatron.seq1f1b.schedule import FAMILY_NAMES


def all_cases() -> list[Case]:
    every = itertools.product((1, 2, 3, 4, 7), (1, 2, 5), ("even", "uneven"), ("ones", "random", "segment"))
    return [Case("1f1b", *each) for each in every if each[0] > 1 or (each[2] == "even" and each[3] != "segment")]


def few(*families: str) -> list[Case]:
    """One case of each kind."""
    sizes = (1, 2), (2, 1), (3, 3), (7, 2)
    uneven = [Case(family, k, m, "uneven", "random") for family in families for k, m in sizes]
    return uneven + [Case(family, 4, 2, "even", "segment") for family in families]


def order_cases(*families: str) -> list[Case]:
    """Sizes that break wrong orders of actions: fewer micro-batches than ranks, no multiple of them, odd segments."""
    sizes = itertools.product(families, (1, 2, 3, 5), (1, 2, 5))
    return [Case(family, k, m, "uneven", "random") for family, k, m in sizes]


def consecutive(family: str) -> list[Case]:
    """Steps of one unit or several; in the first DDP learns what to wait for."""
    return [Case(family, k, m, "even", "random") for k, m in ((2, 2), (1, 1), (3, 1))]


def shared(family: str = "1f1b", multiple: int = 4) -> list[Case]:
    """One case of each kind, in multiples of what context-parallel ranks need."""
    sizes = (1, 2, "even", "random"), (2, 1, "uneven", "random"), (3, 5, "uneven", "random")
    sizes += (4, 2, "even", "segment"), (5, 2, "uneven", "random")
    return [Case(family, *each, multiple=multiple) for each in sizes]


def packed(cases: Iterable[Case], *forms: str) -> list[Case]:
    """The cases, each with documents in one of the forms."""
    return [replace(case, packed=form) for case, form in zip(cases, forms, strict=True)]


def selective(model: Model, *modules: str) -> Model:
    return model.but(recompute="selective", recompute_modules=modules, add_bias_linear=False)


ONE, PIPELINE, CHUNKS = Layout(), Layout(pipeline=2), Layout(pipeline=2, chunks=2)
V = replace(CHUNKS, style="v")
TENSOR = Layout(tensor=2, sequence_parallel=True)
TENSORS = Layout(tensor=2), TENSOR
CONTEXT, GATHERED = Layout(context=2), Layout(context=2, gathers_keys=True)
SHARDED = {"overlap": True, "distributed_optimizer": True}

FEW, SPLIT, SHARED = few("1f1b"), few("zb-h1"), shared()
DOCUMENTS = [
    Case("1f1b", 1, 2, "even", "random", "mask"),
    Case("1f1b", 1, 2, "even", "random", "tokens"),
    Case("1f1b", 2, 2, "uneven", "random", "cu_seqlens"),
    Case("1f1b", 3, 2, "documents", "random", "tokens"),
    Case("1f1b", 4, 2, "uneven", "random", "mask"),
    Case("1f1b", 5, 5, "documents", "random", "cu_seqlens"),
    Case("1f1b", 7, 2, "uneven", "random", "cu_seqlens"),
    # On a CPU a segment within one document has one call of a kernel, others have several.
    Case("1f1b", 5, 2, "uneven", "random", "cu_seqlens", batch=1),
    Case("1f1b", 7, 2, "documents", "random", "tokens", batch=1),
]
UNITS = [
    Case(family, k, m, "even", "random", "units")
    for family, k, m in (("1f1b", 3, 2), ("zb-h1", 7, 3), ("breadth-first", 4, 2), ("gpipe", 2, 1))
]
OFFLOADED = [Case(each, 4, 3, "uneven", "random") for each in ("gpipe", "zb-h1")]
BY_LAYER = {"offloads": 1.0, "layers_leaving": 1}
PAIRS_OFFLOADED = [Case(each, 7, 3, "uneven", "random") for each in ("1f1b", "zb-h1")]
PREDICTED = [replace(case, packed=form) for form in ("cu_seqlens", "tokens") for case in (FEW[0], *FEW[2:4])]

EXACT, LEARNED = Model(), {"tied": True, "positions": "learned_absolute"}
LEARNED_RECOMPUTED = LEARNED | {"recompute": "full"}
LEARNED_GROUPS = Model(kv_heads=2, **LEARNED)
SUMMED = EXACT.but(per_token_loss=True)
FP32 = {"dtype": torch.float32, "per_token_loss": True}
KEPT = {"recompute": "full", "keeps_attention": True}
WINDOW = {"window_size": (9, 0), "window_attn_skip_freq": 2}
SINK = {"softmax_type": "learnable"}
SLIDING = EXACT.but(**WINDOW, **SINK)
EVERY_LAYER = Model(kv_heads=1).but(window_size=(20, 0))  # longer than some segments
LATENT, LATENT_PLAIN = latent(), latent("rope", query_rank=None)
LATENTS = LATENT.but(keeps_latents=True)
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
SHARED_EXPERTS = mixture(moe_shared_expert_intermediate_size=16, **ALL_TO_ALL)
SECOND_DENSE = SHARED_EXPERTS.but(moe_layer_freq=(0, 1))
# A sigmoid in fp32, as Megatron takes it in models of any precision, rounds by the place in its tensor.
BIASED = mixture(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid").but(dtype=torch.float32)
BALANCED = balanced("aux_loss", "seq_aux_loss", moe_z_loss_coeff=0.1)
EXCHANGED = balanced("aux_loss", moe_z_loss_coeff=0.1, **ALL_TO_ALL)
PAIRED = balanced("aux_loss", "seq_aux_loss", moe_z_loss_coeff=0.1, **ALL_TO_ALL)
PAIRED = PAIRED.but(pairs=True, moe_shared_expert_intermediate_size=16)
LATENT_EXPERTS = LATENT.but(layers=4, **dict(balanced("aux_loss", moe_layer_freq=(0, 1, 1, 1)).config))
OF_UNITS = SLIDING, mixture(), EXACT.but(**LEARNED_RECOMPUTED), LATENT, hybrid("GE*-"), hybrid("M*M-")
PREDICTION = EXACT.but(mtp_num_layers=2, mtp_loss_scaling_factor=0.7)
PREDICTION_OF_ONE = PREDICTION.but(mtp_num_layers=1)
FROZEN = EXACT.but(freezes_embedding=True)
# Three heads, which two context-parallel ranks cannot share: each has half of the queries, in two runs.
THREE_HEADS = Model(heads=3, kv_heads=3)


def recurrent(symbol: str):
    """Layers with a state, beside attention; a state passes through a stage or starts on it."""
    exact = hybrid(f"{symbol}-*{symbol}")
    yield exact, PIPELINE, FEW + SPLIT[1:3]
    yield exact.but(recompute="full"), PIPELINE, FEW[1:3] + SPLIT[2:3]
    yield exact.but(recompute="selective"), PIPELINE, FEW[2:3] + SPLIT[3:4]
    yield exact.but(**FP32), PIPELINE, FEW[:2]
    yield exact, CHUNKS, FEW[2:4] + SPLIT[2:3]
    # The loss of documents that are run apart is that of a micro-batch if it is summed per token.
    documents = packed((*FEW[:4], SPLIT[2]), "cu_seqlens", "tokens", "mask", "tokens", "mask")
    yield exact.but(per_token_loss=True), PIPELINE, documents


def chunks(pipeline: int, number: int):
    model, layout = Model(layers=pipeline * number), Layout(pipeline=pipeline, chunks=number)
    yield model, layout, order_cases("1f1b") + few("gpipe", "breadth-first")
    yield model.but(**LEARNED_RECOMPUTED), layout, FEW


def v(pipeline: int, *cases: Case):
    """Every second chunk runs back, so that the first rank has the loss."""
    model, layout = Model(layers=2 * pipeline), replace(V, pipeline=pipeline)
    yield model, layout, cases
    yield model.but(per_token_loss=True), layout, few("1f1b", "auto")
    yield model.but(**LEARNED_RECOMPUTED), layout, few("1f1b", "auto")


def uneven_layout(pipeline: int, parts: str):
    """Layers spread unevenly over stages, some without any, in loops and in a V, for every family."""
    number = (parts.count("|") + 1) // pipeline
    for style in ("looped", "v"):
        layout = Layout(pipeline=pipeline, chunks=number, style=style, parts=parts)
        yield Model(layers=parts.count("t")), layout, [Case(name, 4, 3, "uneven", "random") for name in FAMILY_NAMES]


def expert_parallel(layout: Layout):
    for dispatcher, family in (("allgather", "1f1b"), ("alltoall", "zb-h1")):
        yield balanced("aux_loss", moe_z_loss_coeff=0.1, moe_token_dispatcher_type=dispatcher), layout, few(family)


def overlap():
    for number, family in ((1, "1f1b"), (1, "zb-h1"), (2, "1f1b"), (2, "zb-h1"), (2, "breadth-first")):
        for variant in ({}, {"distributed_optimizer": True}, {"align": True}):
            layout = Layout(pipeline=2, chunks=number, overlap=True, **variant)
            yield EXACT.but(**LEARNED), layout, consecutive(family)


def transformer_engine():
    """Its layers run on CPU tensors by a double of its kernels, see support/te_double.py."""
    cases = [Case(family, k, 2, "uneven", "random") for family in ("1f1b", "zb-h1", "auto") for k in (2, 3)]
    for kind in ("unfused", "fused"):
        model = Model(transformer_engine=kind)
        yield model, PIPELINE, cases
        yield model.but(recompute="full"), Layout(**SHARDED), cases[2:4]
        yield model.but(**KEPT), PIPELINE, [cases[1], cases[3]]
    yield Model(transformer_engine="fused", dtype=torch.float32), TENSOR, cases[:4]


def transformer_engine_experts():
    """Experts by its grouped products, with their weight gradients apart, too: each is ready for DDP once."""
    cases = SPLIT[1:4] + FEW[2:3]
    for kind in ("unfused", "fused"):
        model = SHARED_EXPERTS.but(transformer_engine=kind)
        yield model, PIPELINE, cases
        yield selective(model, "moe_act", "layernorm"), replace(PIPELINE, overlap=True), cases[1:3]
        yield model.but(pairs=True), Layout(expert=2), cases[1:2] + FEW[2:3]


def pairs(pipeline: int):
    """A forward beside a backward of another unit, by Megatron's schedule plans."""
    layout = Layout(pipeline=pipeline, expert=2)
    yield PAIRED, layout, FEW + SPLIT[1:3]
    yield PAIRED.but(per_token_loss=True), layout, [Case("1f1b", 1, 3, "even", "random"), FEW[2]]
    yield SHARED_EXPERTS.but(pairs=True, per_token_loss=True), layout, UNITS[:2]
    yield PAIRED.but(mtp_num_layers=1, mtp_loss_scaling_factor=0.7), layout, FEW[1:3]
    yield SECOND_DENSE.but(pairs=True), layout, FEW[2:3]
    yield PAIRED, replace(layout, **SHARDED), consecutive("1f1b") + consecutive("zb-h1")
    yield EXCHANGED.but(pairs=True), layout, packed(FEW[:3], "mask", "tokens", "cu_seqlens")
    yield LATENT_EXPERTS.but(pairs=True, **ALL_TO_ALL), layout, FEW[1:3]
    for style in ("looped", "v"):
        if pipeline > 1:
            yield PAIRED.but(layers=4), replace(layout, chunks=2, style=style), FEW[:4] + SPLIT[2:3]
    yield selective(PAIRED, "shared_experts", "layernorm", "core_attn"), layout, FEW[2:3] + SPLIT[2:3]
    yield selective(PAIRED, "moe"), layout, FEW[2:4] + SPLIT[2:3]
    yield selective(SECOND_DENSE, "layernorm", "mlp", "moe").but(pairs=True), layout, FEW[2:3]
    yield selective(PAIRED.but(mtp_num_layers=1, mtp_loss_scaling_factor=0.7), "moe"), layout, FEW[2:3]
    yield PAIRED.but(offloads=1.0), layout, PAIRS_OFFLOADED
    yield selective(PAIRED, "layernorm", "moe").but(offloads=1.0), layout, PAIRS_OFFLOADED
    yield LATENT_EXPERTS.but(pairs=True, **ALL_TO_ALL, keeps_latents=True, offloads=1.0), layout, PAIRS_OFFLOADED[:1]
    if pipeline > 1:
        yield PAIRED.but(layers=4, offloads=0.5), replace(layout, chunks=2, style="v"), PAIRS_OFFLOADED[:1]


SUITES = {
    # Forwards run beside backwards.
    "dp2-pairs": pairs(1),
    "pp2-dp2-pairs": pairs(2),
    "tp2-pairs": [(PAIRED, replace(TENSOR, expert=2, expert_tensor=1), [FEW[2], SPLIT[2]])],
    "cp2-pairs": [(PAIRED, replace(CONTEXT, expert=2, distributed_optimizer=True), SHARED[1:3])],
    # Full recomputation that leaves attention out; gradients are bitwise those without recomputation, too.
    "kept-attention": [
        (Model(kv_heads=2).but(**KEPT), PIPELINE, FEW + SPLIT[1:4]),
        (EXACT.but(**KEPT, recompute_method="block"), PIPELINE, FEW[1:3]),
        (SLIDING.but(**KEPT), PIPELINE, FEW[2:4]),
        (SLIDING.but(**KEPT, per_token_loss=True), PIPELINE, packed(FEW[1:2], "mask")),
        (EXACT.but(**KEPT), PIPELINE, packed(FEW[:3], "tokens", "mask", "cu_seqlens")),
        (EXACT.but(**KEPT), V, few("1f1b", "auto")[1:4]),
        (LATENT.but(**KEPT), PIPELINE, FEW[1:3]),
        (LATENTS.but(**KEPT, layers=4), CHUNKS, FEW[1:4] + packed(FEW[1:2], "mask")),
        (BALANCED.but(**KEPT), PIPELINE, FEW[1:3]),
        (hybrid("GM*-").but(**KEPT), PIPELINE, FEW[1:3] + SPLIT[2:3]),
        (hybrid("*-*-/*-").but(**KEPT), PIPELINE, FEW[:3]),
        (PREDICTION.but(**KEPT), PIPELINE, FEW[1:3]),
        (EXACT.but(**KEPT), TENSOR, SPLIT[1:3]),
        (SLIDING.but(kv_heads=1, **KEPT), CONTEXT, SHARED[:3]),
        (SLIDING.but(heads=3, kv_heads=3, **KEPT), GATHERED, SHARED[:3]),
    ],
    # What forwards leave waits in the memory of the host; gradients are bitwise those without that.
    "offload": [
        (EXACT.but(offloads=1.0), PIPELINE, [Case(each, 4, 3, "uneven", "random") for each in FAMILY_NAMES]),
        (EXACT.but(offloads=0.4), PIPELINE, [Case("gpipe", 7, 2, "uneven", "random")]),
        (EXACT.but(**KEPT, offloads=1.0), PIPELINE, OFFLOADED),
        *((model.but(offloads=1.0), PIPELINE, OFFLOADED) for model in (SECOND_DENSE, LATENTS, PREDICTION)),
        (selective(EXACT, "layernorm", "mlp").but(offloads=1.0), PIPELINE, OFFLOADED),
        (SLIDING.but(**KEPT, per_token_loss=True, offloads=1.0), PIPELINE, packed(OFFLOADED[:1], "tokens")),
        (hybrid("GM*-").but(recompute="selective", offloads=1.0), PIPELINE, OFFLOADED),
        (EXACT.but(recompute="full", offloads=1.0), CHUNKS, OFFLOADED),
        (EXACT.but(offloads=1.0), V, [Case(each, 4, 3, "uneven", "random") for each in ("1f1b", "auto")]),
        (SHARED_EXPERTS.but(layers=4, offloads=1.0), V, packed([Case("1f1b", 4, 3, "uneven", "random")], "tokens")),
        (EXACT.but(offloads=1.0), TENSOR, OFFLOADED),
        (EXACT.but(offloads=1.0), CONTEXT, [Case("gpipe", 4, 3, "uneven", "random", multiple=4)]),
        (EXACT.but(**BY_LAYER, layers=8), PIPELINE, [Case(each, 4, 3, "uneven", "random") for each in FAMILY_NAMES]),
        (EXACT.but(**BY_LAYER, layers=8), PIPELINE, [Case("1f1b", 4, 1, "even", "random")]),
        (EXACT.but(**KEPT, **BY_LAYER), PIPELINE, OFFLOADED),
        *((model.but(**BY_LAYER), PIPELINE, OFFLOADED) for model in (SECOND_DENSE, LATENTS, PREDICTION)),
        (selective(EXACT, "layernorm", "mlp").but(**BY_LAYER), PIPELINE, OFFLOADED),
        (hybrid("GM*-").but(recompute="selective", **BY_LAYER), PIPELINE, OFFLOADED),
        (EXACT.but(recompute="full", **BY_LAYER), CHUNKS, OFFLOADED),
        (FROZEN.but(**BY_LAYER), PIPELINE, OFFLOADED),
        (SHARED_EXPERTS.but(layers=4, **BY_LAYER), V, packed([Case("1f1b", 4, 3, "uneven", "random")], "tokens")),
        (EXACT.but(**BY_LAYER), TENSOR, OFFLOADED),
    ],
    # Layers are repeated only in the backward of their input, which a frozen embedding does not ask for.
    "frozen-embedding": [
        (FROZEN.but(recompute="full"), PIPELINE, FEW[:3]),
        (selective(FROZEN, "layernorm", "mlp"), PIPELINE, FEW[:2]),
        (hybrid("*-*-").but(freezes_embedding=True, recompute="full"), PIPELINE, FEW[:2]),
        (FROZEN.but(recompute="full"), V, few("auto")[:2]),
        (FROZEN.but(**KEPT, offloads=1.0), PIPELINE, OFFLOADED),
        (FROZEN.but(recompute="full", offloads=1.0), PIPELINE, OFFLOADED),
    ],
    # Units of equal size, whatever the micro-batches of the data.
    "units": [
        (SUMMED, PIPELINE, UNITS),
        *((model.but(per_token_loss=True), PIPELINE, UNITS[:2]) for model in OF_UNITS),
        (SUMMED.but(**KEPT), PIPELINE, UNITS[:2]),
        (SUMMED.but(offloads=1.0), PIPELINE, UNITS[:2]),
        (SUMMED, CHUNKS, UNITS),
        (SUMMED, V, UNITS),
        (SUMMED, TENSOR, UNITS[:2]),
        (SUMMED, CONTEXT, [replace(case, multiple=4) for case in UNITS[:2]]),
        (SUMMED, Layout(**SHARDED), UNITS[:2]),
        (mixture(**ALL_TO_ALL).but(per_token_loss=True), Layout(expert=2), UNITS[:2]),
    ],
    "pp1-units": [(SUMMED, ONE, UNITS[:2])],
    "pp4-units": [(SUMMED, Layout(pipeline=4), UNITS), (SUMMED.but(layers=8), replace(V, pipeline=4), UNITS)],
    "pp2-dp2-units": [
        (SUMMED, Layout(pipeline=2, **SHARDED), UNITS),
        (mixture(**ALL_TO_ALL).but(per_token_loss=True), Layout(pipeline=2, expert=2), UNITS[:2]),
    ],
    # Megatron's --recompute-modules; some discard an output and make it again when its gradient comes.
    "recompute-modules": [
        (selective(EXACT, "layernorm", "mlp"), PIPELINE, FEW[1:3] + SPLIT[2:3]),
        (selective(EXACT, "layernorm"), V, few("auto")[2:3]),
        (selective(LATENT, "mla_up_proj", "layernorm", "mlp"), PIPELINE, FEW[1:3] + SPLIT[2:3]),
        (selective(SHARED_EXPERTS, "shared_experts", "layernorm"), PIPELINE, FEW[1:3] + SPLIT[2:3]),
        (selective(hybrid("G*-M"), "layernorm", "mlp"), PIPELINE, FEW[2:3] + SPLIT[2:3]),
    ],
    # Two more tokens are predicted, also across segments that are shorter than that.
    "pp2-mtp": [
        (PREDICTION, PIPELINE, FEW + SPLIT[1:3]),
        (PREDICTION.but(per_token_loss=True), PIPELINE, FEW[1:3]),
        (PREDICTION.but(recompute="full"), CHUNKS, FEW[2:3]),
        (PREDICTION, PIPELINE, PREDICTED + packed(SPLIT[2:3], "cu_seqlens")),
        (PREDICTION.but(per_token_loss=True), PIPELINE, PREDICTED[1:3]),
    ],
    # Layers behind a / of the pattern, on the last stage.
    "pp2-hybrid-mtp": [
        (hybrid("G*-M/*-/*-"), PIPELINE, FEW[:4] + SPLIT[2:3]),
        (hybrid("G*-M/GM").but(recompute="full"), CHUNKS, FEW[1:2]),
        (hybrid("*-*-/*-").but(per_token_loss=True), V, FEW[2:3]),
    ],
    "pp2-v-mtp": [(PREDICTION_OF_ONE, V, few("1f1b", "auto"))],
    # Multi-token prediction before the stage with the loss: beside layers, and alone.
    "pp3-mtp": [
        (PREDICTION, Layout(pipeline=3, parts="Ett|ttmm|L"), FEW[:3]),
        (PREDICTION.but(recompute="full"), Layout(pipeline=3, parts="Etttt|mm|L"), FEW[1:4]),
    ],
    "pp2-chunks3-layout": uneven_layout(2, "Et|tt||t|ttt|L"),
    "pp2-chunks5-layout": uneven_layout(2, "E|t|tt||t|t|t||t|tL"),
    "pp3-chunks2-layout": uneven_layout(3, "Et||tt|t|t|tttL"),
    "pp4-chunks2-layout": uneven_layout(4, "Ett|t|t|t||tt|t|tL"),
    "tp2-mtp": [(PREDICTION_OF_ONE, TENSOR, FEW[1:3])],
    # Heads shared among context-parallel ranks: with more KV heads than ranks or fewer, sinks, windows, documents.
    "cp2": [
        (EXACT, CONTEXT, SHARED),
        (Model(kv_heads=1, recompute="selective", **LEARNED), CONTEXT, SHARED[1:3]),
        (Model(kv_heads=2).but(**FP32), CONTEXT, SHARED[2:4]),
        (SLIDING.but(recompute="full"), replace(CONTEXT, **SHARDED), SHARED[1:3]),
        (LATENT, CONTEXT, SHARED[2:3]),
        (EXACT, CONTEXT, packed(SHARED[:3], "tokens", "cu_seqlens", "mask")),
        (BALANCED, CONTEXT, SHARED[1:3]),
    ],
    "pp2-cp2": [
        (Model(kv_heads=1), replace(CONTEXT, pipeline=2), SHARED[1:3] + shared("zb-h1")[2:3]),
        (PREDICTION_OF_ONE, replace(CONTEXT, pipeline=2), SHARED[1:3]),
        (hybrid("GM*-"), replace(CONTEXT, pipeline=2), SHARED[1:3]),
    ],
    "cp2-gather": [
        (THREE_HEADS, GATHERED, SHARED),
        (SLIDING.but(heads=3, kv_heads=3, recompute="full"), replace(GATHERED, **SHARDED), SHARED[1:3]),
        (THREE_HEADS.but(kv_heads=1), GATHERED, packed(SHARED[:3], "tokens", "cu_seqlens", "mask")),
    ],
    # The last tokens of each of the two runs that a context-parallel rank has of a segment predict those of others.
    "cp2-mtp": [
        (PREDICTION, CONTEXT, SHARED),
        (PREDICTION.but(per_token_loss=True), CONTEXT, SHARED[1:3]),
        (PREDICTION, CONTEXT, packed(SHARED[2:3], "cu_seqlens")),
    ],
    "cp2-moe": [(EXCHANGED, replace(CONTEXT, expert=2, distributed_optimizer=True), SHARED[1:3])],
    "cp2-recurrent": [(hybrid("G*M"), CONTEXT, SHARED)],
    "tp2-cp2": [(EXACT, replace(TENSOR, context=2, distributed_optimizer=True), SHARED[2:3])],
    # Of six heads, two pairs of ranks share three and three.
    "cp4-gather": [(Model(heads=6, kv_heads=2), replace(GATHERED, context=4), shared(multiple=8)[1:3])],
    "transformer-engine": transformer_engine(),
    "transformer-engine-moe": transformer_engine_experts(),
    **{
        f"pp{size}": [(EXACT, Layout(size), all_cases()), *((model, Layout(size), FEW) for model in variants())]
        for size in (1, 2, 4)
    },
    "pp2-families": [
        (EXACT, PIPELINE, order_cases("gpipe", "breadth-first")),
        (EXACT, CHUNKS, order_cases("1f1b") + few("gpipe", "breadth-first")),
    ],
    "pp2-chunks3": chunks(2, 3),
    "pp4-chunks2": chunks(4, 2),
    "pp2-split": [
        (EXACT, PIPELINE, order_cases("zb-h1", "auto")),
        *((model, PIPELINE, SPLIT) for model in variants()[1:]),
        (EXACT, CHUNKS, few("zb-h1", "auto")),
    ],
    "pp4-split": [(EXACT, Layout(pipeline=4), order_cases("zb-h1", "auto"))],
    "pp2-tp2-split": [
        (EXACT, replace(TENSOR, pipeline=2), SPLIT),
        *((variants()[1], replace(layout, pipeline=2), SPLIT) for layout in TENSORS),
    ],
    "pp2-dp2-overlap": overlap(),
    "pp2-v": [*v(2, *order_cases("1f1b", "auto"), *few(*FAMILY_NAMES)), (hybrid("G*-M"), V, few("auto")[2:3])],
    "pp4-v": v(4, *few("1f1b", "zb-h1", "auto")),
    "pp2-dp2-v": [
        (Model(per_token_loss=family == "auto"), replace(V, overlap=True, **variant), consecutive(family))
        for variant in ({}, {"distributed_optimizer": True})
        for family in ("1f1b", "auto")
    ],
    "tp2": [(model, layout, FEW) for layout in TENSORS for model in (EXACT, LEARNED_GROUPS)],
    "pp2-tp2": [(model, replace(layout, pipeline=2), FEW) for layout in TENSORS for model in (EXACT, LEARNED_GROUPS)],
    # Each way to mark documents, and one step of each kind in each model.
    "pp2-documents": [
        (EXACT, PIPELINE, DOCUMENTS),
        *((model, PIPELINE, DOCUMENTS[1:4]) for model in (*variants(), LATENT, mixture())),
        (EXACT, PIPELINE, [replace(case, family="zb-h1") for case in DOCUMENTS[3:6]]),
    ],
    "pp2-tp2-documents": [(variants()[1], Layout(2, 1, 2, True), [replace(DOCUMENTS[3], k=4)])],
    "pp2-positions": [(model, PIPELINE, FEW) for model in positions()],
    # Multi-latent attention.
    "pp2-mla": [
        (LATENT, PIPELINE, few("1f1b", "zb-h1")),
        (LATENT_PLAIN, PIPELINE, FEW),
        (LATENT.but(recompute="full"), PIPELINE, FEW),
        (LATENT.but(recompute="selective"), PIPELINE, SPLIT),
        (LATENT.but(recompute="selective", recompute_modules=("mla_up_proj",)), PIPELINE, SPLIT),
        (LATENT.but(**FP32), PIPELINE, FEW),
    ],
    # It keeps latents, not keys and values; not with W, where it keeps the latter.
    "pp2-latents": [
        (LATENTS, PIPELINE, few("1f1b", "zb-h1") + packed(FEW[1:3], "tokens", "mask")),
        (LATENTS.but(recompute="full", layers=4), CHUNKS, FEW[1:4]),
        (LATENTS.but(**FP32), PIPELINE, FEW[1:3]),
        (LATENTS.but(recompute="selective"), PIPELINE, FEW[2:3]),
        (LATENT_PLAIN.but(keeps_latents=True), Layout(**SHARDED), FEW[1:4]),
    ],
    "tp2-mla": [*((LATENT, layout, FEW) for layout in TENSORS), (LATENT_PLAIN, TENSOR, SPLIT)],
    # Mixtures of experts.
    "pp2-moe": [
        (mixture(), PIPELINE, few("1f1b", "zb-h1")),
        (SECOND_DENSE, PIPELINE, SPLIT),
        (SECOND_DENSE.but(recompute="full"), PIPELINE, FEW),
        (SECOND_DENSE.but(recompute="selective", recompute_modules=("moe", "core_attn")), PIPELINE, SPLIT),
        (BIASED, PIPELINE, FEW),
    ],
    "pp2-moe-losses": [
        (BALANCED, PIPELINE, SPLIT),
        (BALANCED.but(per_token_loss=True), PIPELINE, FEW),
        (BALANCED.but(recompute="full"), PIPELINE, FEW),
    ],
    # Latents and experts together, in chunks, on packed documents.
    "pp2-mla-moe": [
        (LATENT_EXPERTS, CHUNKS, few("1f1b", "breadth-first") + packed(FEW[:3], "mask", "tokens", "cu_seqlens"))
    ],
    # Balance over all micro-batches of a step so far.
    "pp1-moe-global": [(balanced("global_aux_loss").but(recompute=each), ONE, FEW) for each in (None, "full")],
    "dp2-moe": expert_parallel(Layout(expert=2)),
    "pp2-dp2-moe": expert_parallel(Layout(pipeline=2, expert=2, **SHARDED)),
    "tp2-moe": [
        (BALANCED, TENSOR, SPLIT),
        (BALANCED.but(per_token_loss=True, **ALL_TO_ALL), replace(TENSOR, expert=2, expert_tensor=1), FEW),
    ],
    # Sliding windows in every second layer, a sink in the softmax, and both as gpt-oss has them.
    "pp2-windows": [
        (SLIDING, PIPELINE, FEW),
        (Model(kv_heads=2).but(recompute="selective", **WINDOW), PIPELINE, SPLIT[1:3]),
        (EXACT.but(softmax_type="off-by-one"), PIPELINE, FEW[1:3]),
        (EXACT.but(**SINK), PIPELINE, packed(FEW[2:3], "tokens")),
        (EVERY_LAYER.but(recompute="full"), CHUNKS, FEW[2:4] + SPLIT[3:4]),
        (EVERY_LAYER, V, few("auto")[2:4]),
        (EVERY_LAYER.but(per_token_loss=True, **SINK), PIPELINE, packed(FEW[2:4], "tokens", "mask")),
    ],
    # Attention, MLP and experts as layers of their own.
    "pp2-hybrid": [(hybrid("*-*-"), PIPELINE, SPLIT[1:]), (hybrid("*E*-"), CHUNKS, FEW[1:])],
    "pp1-recurrent": [(hybrid("G*M"), ONE, FEW)],
    # Four stages of one layer each, and of two chunks.
    "pp4-recurrent": [
        (hybrid("GM*-"), Layout(pipeline=4), FEW + SPLIT),
        (hybrid("GM*-").but(recompute="full"), Layout(pipeline=4), FEW[1:3] + SPLIT[2:3]),
        (hybrid("GE*M-G*-"), replace(CHUNKS, pipeline=4), FEW[1:] + SPLIT[2:4] + few("breadth-first")[2:3]),
    ],
    "pp2-delta-net": recurrent("G"),
    "pp2-mamba": recurrent("M"),
    "tp2-recurrent": [(hybrid("G*M-"), layout, SPLIT[1:3]) for layout in TENSORS],
    "dp2": [(model, ONE, FEW) for model in (EXACT, variants()[1])],
    "pp2-dp2": [(model, PIPELINE, FEW) for model in (EXACT, variants()[1])],
}
# Some are generators.
SUITES = {name: [*suite] for name, suite in SUITES.items()}


@dataclass(frozen=True)
class Group:
    """Consecutive steps of one model in one layout, by the ids of the cases."""

    suite: str
    model: Model
    layout: Layout
    cases: dict[str, Case]

    @property
    def ranks(self) -> int:
        """The product of the sizes in the name of the suite, which has two ranks if it names none."""
        return prod(int(size) for size in re.findall(r"\b(?:pp|tp|dp|cp)(\d+)", self.suite) or [2])

    def representatives(self) -> list[str]:
        """One case of each family, with three segments if there is one."""
        chosen = {}
        for name, case in self.cases.items():
            if case.family not in chosen or case.k == 3:
                chosen[case.family] = name
        return [*chosen.values()]


def groups() -> Iterator[Group]:
    """The whole matrix; a case has the id suite/group/step."""
    for suite, rows in SUITES.items():
        for number, (model, layout, cases) in enumerate(rows):
            prefix = "-".join(filter(None, (str(number), model.label, layout.label)))
            named: dict[str, Case] = {}
            for case in cases:
                name = f"{suite}/{prefix}/{case.label}"
                while name in named:  # the same step again, of a model that has made others since
                    name += "-again"
                named[name] = case
            yield Group(suite, model, layout, named)


def representatives() -> set[str]:
    """The ids of a few cases that stand for all: of the first group of every suite, and one of the last."""
    chosen: set[str] = set()
    for _, (first, *others) in itertools.groupby(groups(), lambda group: group.suite):
        chosen.update(first.representatives())
        chosen.update(others[-1].representatives()[-1:] if others else ())
    return chosen
