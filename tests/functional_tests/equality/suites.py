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


def all_cases(families=("1f1b",)):
    return [
        Case(family, k, m, split, mask)
        for family, k, m, split, mask in itertools.product(
            families, (1, 2, 3, 4, 7), (1, 2, 5), ("even", "uneven"), ("ones", "random", "segment")
        )
        if k > 1 or (split, mask) in (("even", "ones"), ("even", "random"))
    ]


def few_cases(families=("1f1b",)):
    """One case of each kind."""
    return [
        *(Case(family, k, m, "uneven", "random") for family in families for k, m in ((1, 2), (2, 1), (3, 5), (7, 2))),
        *(Case(family, 4, 2, "even", "segment") for family in families),
    ]


def packed(cases: Iterable[Case], *forms: str) -> list[Case]:
    """The cases, each with documents in one of the forms."""
    return [replace(case, packed=form) for case, form in zip(cases, forms, strict=True)]


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
    """Sizes that break wrong orders of actions: fewer micro-batches than ranks, no multiple of them, odd segments."""
    return [
        Case(family, k, m, "uneven", "random") for family, k, m in itertools.product(families, (1, 2, 3, 5), (1, 2, 5))
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
    if pipeline == 2:
        yield hybrid("G*-M"), layout, few_cases(("auto",))[2:3]


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
    """Each way to mark documents, and one step of each kind in each model."""
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


def latents_suite():
    """Multi-latent attention that keeps latents, not keys and values; not with W, where it keeps the latter."""
    layout, exact = Layout(pipeline=2), replace(latent(), keeps_latents=True)
    documents = packed(few_cases()[1:3], "tokens", "mask")
    yield exact, layout, few_cases(("1f1b", "zb-h1")) + documents
    yield replace(exact, recompute="full", layers=4), replace(layout, chunks=2), few_cases()[1:4]
    yield replace(exact, dtype=torch.float32, per_token_loss=True), layout, few_cases()[1:3]
    yield replace(exact, recompute="selective"), layout, few_cases()[2:3]
    overlapped = replace(layout, pipeline=1, overlap=True, distributed_optimizer=True)
    yield replace(latent("rope", query_rank=None), keeps_latents=True), overlapped, few_cases()[1:4]


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
    documents = packed(cases[:3], *forms)
    yield model, Layout(pipeline=2, chunks=2), cases + documents


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


def windows_suite():
    """Sliding windows in every second layer, a sink in the softmax, and both as gpt-oss has them."""
    layout, cases = Layout(pipeline=2), few_cases()
    window = {"window_size": (9, 0), "window_attn_skip_freq": 2}
    yield Model().with_config(**window, softmax_type="learnable"), layout, cases
    recomputed = replace(Model(kv_heads=2), recompute="selective").with_config(**window)
    yield recomputed, layout, few_cases(("zb-h1",))[1:3]
    yield Model().with_config(softmax_type="off-by-one"), layout, cases[1:3]
    yield Model().with_config(softmax_type="learnable"), layout, [replace(cases[2], packed="tokens")]
    # In every layer, and longer than some segments.
    every = Model(kv_heads=1).with_config(window_size=(20, 0))
    yield replace(every, recompute="full"), replace(layout, chunks=2), cases[2:4] + few_cases(("zb-h1",))[3:4]
    yield every, replace(layout, chunks=2, style="v"), few_cases(("auto",))[2:4]
    documents = packed(cases[2:4], "tokens", "mask")
    yield replace(every, per_token_loss=True).with_config(softmax_type="learnable"), layout, documents


def hybrid_suite():
    """Attention, MLP and experts as layers of their own."""
    yield hybrid("*-*-"), Layout(pipeline=2), few_cases(("zb-h1",))[1:]
    yield hybrid("*E*-"), Layout(pipeline=2, chunks=2), few_cases()[1:]


def recurrent_suite(symbol: str):
    """Layers with a state, beside attention; a state passes through a stage or starts on it."""
    layout, exact, cases = Layout(pipeline=2), hybrid(f"{symbol}-*{symbol}"), few_cases()
    split = few_cases(("zb-h1",))
    yield exact, layout, cases + split[1:3]
    yield replace(exact, recompute="full"), layout, cases[1:3] + split[2:3]
    yield replace(exact, recompute="selective"), layout, cases[2:3] + split[3:4]
    yield replace(exact, dtype=torch.float32, per_token_loss=True), layout, cases[:2]
    yield exact, Layout(pipeline=2, chunks=2), cases[2:4] + split[2:3]
    # The loss of documents that are run apart is that of a micro-batch if it is summed per token.
    documents = packed((*cases[:4], split[2]), "cu_seqlens", "tokens", "mask", "tokens", "mask")
    yield replace(exact, per_token_loss=True), layout, documents


def recurrent_pipeline_suite():
    """Four stages of one layer each, and of two chunks."""
    layout, exact, cases, split = Layout(pipeline=4), hybrid("GM*-"), few_cases(), few_cases(("zb-h1",))
    yield exact, layout, cases + split
    yield replace(exact, recompute="full"), layout, cases[1:3] + split[2:3]
    yield hybrid("GE*M-G*-"), replace(layout, chunks=2), cases[1:] + split[2:4] + few_cases(("breadth-first",))[2:3]


def hybrid_prediction_suite():
    """Layers behind a / of the pattern, on the last stage."""
    layout, cases = Layout(pipeline=2), few_cases()
    yield hybrid("G*-M/*-/*-"), layout, cases[:4] + few_cases(("zb-h1",))[2:3]
    yield replace(hybrid("G*-M/GM"), recompute="full"), replace(layout, chunks=2), cases[1:2]
    yield replace(hybrid("*-*-/*-"), per_token_loss=True), replace(layout, chunks=2, style="v"), cases[2:3]


def recurrent_tensor_suite():
    for sequence_parallel in (False, True):
        yield hybrid("G*M-"), Layout(tensor=2, sequence_parallel=sequence_parallel), few_cases(("zb-h1",))[1:3]


def context_cases(families=("1f1b",)):
    """As `few_cases`, in multiples of what two context-parallel ranks need."""
    for family in families:
        for k, m, split, mask in (
            (1, 2, "even", "random"),
            (2, 1, "uneven", "random"),
            (3, 5, "uneven", "random"),
            (4, 2, "even", "segment"),
            (5, 2, "uneven", "random"),
        ):
            yield Case(family, k, m, split, mask, multiple=4)


def context_suite():
    """Heads shared among context-parallel ranks: with more KV heads than ranks or fewer, sinks, windows, documents."""
    layout, cases = Layout(context=2), list(context_cases())
    yield Model(), layout, cases
    yield replace(Model(kv_heads=1), positions="learned_absolute", tied=True, recompute="selective"), layout, cases[1:3]
    yield replace(Model(kv_heads=2), dtype=torch.float32, per_token_loss=True), layout, cases[2:4]
    sliding = Model().with_config(window_size=(9, 0), window_attn_skip_freq=2, softmax_type="learnable")
    yield replace(sliding, recompute="full"), replace(layout, overlap=True, distributed_optimizer=True), cases[1:3]
    yield latent(), layout, cases[2:3]
    documents = packed(cases[:3], "tokens", "cu_seqlens", "mask")
    yield Model(), layout, documents
    yield balanced("aux_loss", "seq_aux_loss", moe_z_loss_coeff=0.1), layout, cases[1:3]


def context_pipeline_suite():
    layout, cases = Layout(pipeline=2, context=2), list(context_cases())[1:3]
    yield Model(kv_heads=1), layout, cases + list(context_cases(("zb-h1",)))[2:3]
    yield Model().with_config(mtp_num_layers=1, mtp_loss_scaling_factor=0.7), layout, cases
    yield hybrid("GM*-"), layout, cases


def gathered_context_suite():
    """Three heads, which two context-parallel ranks cannot share: each has half of the queries, in two runs."""
    layout, cases = Layout(context=2, gathers_keys=True), list(context_cases())
    model = Model(heads=3, kv_heads=3)
    yield model, layout, cases
    sliding = model.with_config(window_size=(9, 0), window_attn_skip_freq=2, softmax_type="learnable")
    yield replace(sliding, recompute="full"), replace(layout, overlap=True, distributed_optimizer=True), cases[1:3]
    documents = packed(cases[:3], "tokens", "cu_seqlens", "mask")
    yield replace(model, kv_heads=1), layout, documents


def selective(model: Model, *modules: str) -> Model:
    return replace(model, recompute="selective").with_config(recompute_modules=modules, add_bias_linear=False)


def recomputed_modules_suite():
    """Megatron's --recompute-modules; some discard an output and make it again when its gradient comes."""
    layout, cases = Layout(pipeline=2), few_cases()
    some = cases[1:3] + few_cases(("zb-h1",))[2:3]

    yield selective(Model(), "layernorm", "mlp"), layout, some
    yield selective(Model(), "layernorm"), replace(layout, chunks=2, style="v"), few_cases(("auto",))[2:3]
    yield selective(latent(), "mla_up_proj", "layernorm", "mlp"), layout, some
    yield selective(mixture(**SHARED), "shared_experts", "layernorm"), layout, some
    yield selective(hybrid("G*-M"), "layernorm", "mlp"), layout, some[1:]


def kept_attention_suite():
    """Full recomputation that leaves attention out; gradients are bitwise those without recomputation, too."""
    kept = {"recompute": "full", "keeps_attention": True}
    layout, in_v = Layout(pipeline=2), Layout(pipeline=2, chunks=2, style="v")
    in_heads, in_queries = Layout(context=2), Layout(context=2, gathers_keys=True)
    cases, split = few_cases(), few_cases(("zb-h1",))
    documents = packed(cases[:3], "tokens", "mask", "cu_seqlens")
    window = {"window_size": (9, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}
    yield replace(Model(kv_heads=2), **kept), layout, cases + split[1:4]
    yield replace(Model(), **kept).with_config(recompute_method="block"), layout, cases[1:3]
    yield replace(Model().with_config(**window), **kept), layout, cases[2:4]
    yield replace(Model().with_config(**window), **kept, per_token_loss=True), layout, documents[1:2]
    yield replace(Model(), **kept), layout, documents
    yield replace(Model(), **kept), in_v, few_cases(("1f1b", "auto"))[1:4]
    yield replace(latent(), **kept), layout, cases[1:3]
    two_chunks = replace(layout, chunks=2)
    yield replace(latent(), **kept, keeps_latents=True, layers=4), two_chunks, cases[1:4] + documents[1:2]
    yield replace(balanced("aux_loss", "seq_aux_loss", moe_z_loss_coeff=0.1), **kept), layout, cases[1:3]
    yield replace(hybrid("GM*-"), **kept), layout, cases[1:3] + split[2:3]
    yield replace(Model().with_config(mtp_num_layers=2, mtp_loss_scaling_factor=0.7), **kept), layout, cases[1:3]
    yield replace(Model(), **kept), Layout(tensor=2, sequence_parallel=True), split[1:3]
    for model, shared in ((Model(kv_heads=1), in_heads), (Model(heads=3, kv_heads=3), in_queries)):
        yield replace(model.with_config(**window), **kept), shared, list(context_cases())[:3]


def prediction_suite():
    """Two more tokens are predicted, also across segments that are shorter than that."""
    layout, cases = Layout(pipeline=2), few_cases()
    model = Model().with_config(mtp_num_layers=2, mtp_loss_scaling_factor=0.7)
    yield model, layout, cases + few_cases(("zb-h1",))[1:3]
    yield replace(model, per_token_loss=True), layout, cases[1:3]
    yield replace(model, recompute="full"), Layout(pipeline=2, chunks=2), cases[2:3]
    documents = [replace(case, packed=form) for form in ("cu_seqlens", "tokens") for case in (cases[0], *cases[2:4])]
    yield model, layout, documents + [replace(few_cases(("zb-h1",))[2], packed="cu_seqlens")]
    yield replace(model, per_token_loss=True), layout, documents[1:3]


def laid_out_prediction_suite():
    """Multi-token prediction before the stage with the loss: beside layers, and alone."""
    model, cases = Model().with_config(mtp_num_layers=2, mtp_loss_scaling_factor=0.7), few_cases()
    yield model, Layout(pipeline=3, parts="Ett|ttmm|L"), cases[:3]
    yield replace(model, recompute="full"), Layout(pipeline=3, parts="Etttt|mm|L"), cases[1:4]


def uneven_layout_suite(pipeline: int, parts: str):
    """Layers spread unevenly over stages, some without any, in loops and in a V, for every family."""
    chunks = (parts.count("|") + 1) // pipeline
    for style in ("looped", "v"):
        layout = Layout(pipeline=pipeline, chunks=chunks, style=style, parts=parts)
        yield Model(layers=parts.count("t")), layout, [Case(name, 4, 3, "uneven", "random") for name in FAMILY_NAMES]


def context_prediction_suite():
    """The last tokens of each of the two runs that a context-parallel rank has of a segment predict those of others."""
    layout, cases = Layout(context=2), list(context_cases())
    model = Model().with_config(mtp_num_layers=2, mtp_loss_scaling_factor=0.7)
    yield model, layout, cases
    yield replace(model, per_token_loss=True), layout, cases[1:3]
    yield model, layout, [replace(cases[2], packed="cu_seqlens")]


def transformer_engine_suite():
    """Its layers run on CPU tensors by a double of its kernels, see support/te_double.py."""
    cases = [Case(family, k, 2, "uneven", "random") for family in ("1f1b", "zb-h1", "auto") for k in (2, 3)]
    for kind in ("unfused", "fused"):
        yield Model(transformer_engine=kind), Layout(pipeline=2), cases
        overlapped = Layout(pipeline=2, overlap=True, distributed_optimizer=True)
        yield Model(transformer_engine=kind, recompute="full"), replace(overlapped, pipeline=1), cases[2:4]
        kept = Model(transformer_engine=kind, recompute="full", keeps_attention=True)
        yield kept, Layout(pipeline=2), [cases[1], cases[3]]
    yield Model(transformer_engine="fused", dtype=torch.float32), Layout(tensor=2, sequence_parallel=True), cases[:4]


def transformer_engine_experts_suite():
    """Experts by its grouped products, with their weight gradients apart, too."""
    cases = few_cases(("zb-h1",))[1:4] + few_cases()[2:3]
    for kind in ("unfused", "fused"):
        model = replace(mixture(**SHARED), transformer_engine=kind)
        yield model, Layout(pipeline=2), cases
        yield selective(model, "moe_act", "layernorm"), Layout(pipeline=2), cases[1:3]


SUITES = {
    "kept-attention": kept_attention_suite,
    "recompute-modules": recomputed_modules_suite,
    "pp2-mtp": prediction_suite,
    "pp2-hybrid-mtp": hybrid_prediction_suite,
    "pp2-v-mtp": lambda: [
        (
            Model().with_config(mtp_num_layers=1, mtp_loss_scaling_factor=0.7),
            Layout(pipeline=2, chunks=2, style="v"),
            few_cases(("1f1b", "auto")),
        )
    ],
    "pp3-mtp": laid_out_prediction_suite,
    "pp2-chunks3-layout": lambda: uneven_layout_suite(2, "Et|tt||t|ttt|L"),
    "pp2-chunks5-layout": lambda: uneven_layout_suite(2, "E|t|tt||t|t|t||t|tL"),
    "pp3-chunks2-layout": lambda: uneven_layout_suite(3, "Et||tt|t|t|tttL"),
    "pp4-chunks2-layout": lambda: uneven_layout_suite(4, "Ett|t|t|t||tt|t|tL"),
    "tp2-mtp": lambda: [
        (
            Model().with_config(mtp_num_layers=1, mtp_loss_scaling_factor=0.7),
            Layout(tensor=2, sequence_parallel=True),
            few_cases()[1:3],
        )
    ],
    "cp2": context_suite,
    "pp2-cp2": context_pipeline_suite,
    "cp2-gather": gathered_context_suite,
    "cp2-mtp": context_prediction_suite,
    "cp2-moe": lambda: [
        (
            balanced("aux_loss", moe_z_loss_coeff=0.1, moe_token_dispatcher_type="alltoall"),
            Layout(context=2, expert=2, distributed_optimizer=True),
            list(context_cases())[1:3],
        )
    ],
    "cp2-recurrent": lambda: [(hybrid("G*M"), Layout(context=2), list(context_cases()))],
    "tp2-cp2": lambda: [
        (
            Model(),
            Layout(tensor=2, context=2, sequence_parallel=True, distributed_optimizer=True),
            list(context_cases())[2:3],
        ),
    ],
    # Of six heads, two pairs of ranks share three and three.
    "cp4-gather": lambda: [
        (
            Model(heads=6, kv_heads=2),
            Layout(context=4, gathers_keys=True),
            [replace(case, multiple=8) for case in context_cases()][1:3],
        )
    ],
    "transformer-engine": transformer_engine_suite,
    "transformer-engine-moe": transformer_engine_experts_suite,
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
    "pp2-latents": latents_suite,
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
    "pp2-windows": windows_suite,
    "pp2-hybrid": hybrid_suite,
    "pp1-recurrent": lambda: [(hybrid("G*M"), Layout(), few_cases())],
    "pp4-recurrent": recurrent_pipeline_suite,
    "pp2-delta-net": lambda: recurrent_suite("G"),
    "pp2-mamba": lambda: recurrent_suite("M"),
    "tp2-recurrent": recurrent_tensor_suite,
    "dp2": lambda: data_suite(1),
    "pp2-dp2": lambda: data_suite(2),
}


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
    for suite, make in SUITES.items():
        for number, (model, layout, cases) in enumerate(make()):
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
    by_suite: dict[str, list[Group]] = {}
    for group in groups():
        by_suite.setdefault(group.suite, []).append(group)
    chosen: set[str] = set()
    for first, *others in by_suite.values():
        chosen.update(first.representatives())
        chosen.update(others[-1].representatives()[-1:] if others else ())
    return chosen
