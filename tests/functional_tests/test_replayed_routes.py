"""Mixtures of experts whose program replays or records the experts of tokens: by segments, losses, gradients and routes
are those of Megatron's own schedule."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

import megatron.seq1f1b
from frameworks.own_attention import OWN_ATTENTION
from functional_tests.equality.cases import Layout
from functional_tests.equality.layout import build, groups_of, named, use_ranks
from functional_tests.equality.models import VOCABULARY, Model, options
from megatron.seq1f1b.process.patches import patched
from support.on_ranks import on_ranks

LENGTHS = (24, 12, 20)  # of the sequences of each micro-batch
NUM_EXPERTS, TOPK, SEQUENCES = 4, 2, 2
EXPERTS = Model(
    config=options(
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=16,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_enable_routing_replay=True,
        add_bias_linear=False,
    )
)
RECOMPUTED = EXPERTS.but(recompute="full")


@dataclass
class Found:
    losses: list
    gradients: dict
    recorded: list


def own_tokens(length: int, layout: Layout) -> torch.Tensor:
    """The places of this rank's tokens in a sequence: of twice as many parts as context-parallel ranks, its own from
    the front and its own from the back."""
    parts = torch.arange(length).chunk(2 * layout.context)
    rank = parallel_state.get_context_parallel_rank() if layout.context > 1 else 0
    return torch.cat([parts[rank], parts[-1 - rank]])


def own_rows(rows: torch.Tensor, length: int, layout: Layout, is_packed: bool) -> torch.Tensor:
    """Of [s b, k] for all tokens of a micro-batch, packed one document after the other, those of this rank's tokens."""
    own = own_tokens(length, layout)
    if is_packed:
        return rows.view(SEQUENCES, length, -1)[:, own].flatten(0, 1)
    return rows.view(length, SEQUENCES, -1)[own].flatten(0, 1)


class Routes:
    """Random experts for the tokens of each micro-batch, as the routers of this rank see them: [s b, k]."""

    def __init__(self, layout: Layout, is_packed: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        ranks = layout.tensor if layout.sequence_parallel else 1
        rank = parallel_state.get_tensor_model_parallel_rank() if layout.sequence_parallel else 0
        layers = range(EXPERTS.layers)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        per_stage = EXPERTS.layers // layout.pipeline
        self._of_microbatches = []
        for length in LENGTHS:
            scores = [torch.rand(length * SEQUENCES, NUM_EXPERTS, generator=generator) for _ in layers]
            own = scores[stage * per_stage : (stage + 1) * per_stage]
            chosen = [own_rows(each.topk(TOPK).indices, length, layout, is_packed) for each in own]
            self._of_microbatches.append([each.chunk(ranks)[rank] for each in chosen])

    def replay(self, microbatch: int) -> None:
        RouterReplay.set_replay_data(self._of_microbatches[microbatch])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def forward_step(before, after, layout, is_packed, batches, model):
    microbatch, tokens = next(batches)
    before(microbatch)
    length = tokens.shape[1]
    own = own_tokens(length, layout)
    labels = tokens.roll(-1, dims=1)[:, own]
    tokens = tokens[:, own]
    positions = torch.arange(length)[own].expand(2, -1)
    if is_packed:
        bounds = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=length, max_seqlen_kv=length)
        flat = [of_token.reshape(1, -1) for of_token in (tokens, positions, labels)]
        output = model(flat[0], flat[1], None, labels=flat[2], packed_seq_params=packed)
    else:
        mask = None
        if layout.context == 1:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        output = model(tokens, positions, mask, labels=labels)
    after(microbatch)
    return output, lambda losses: (losses.sum(), {"loss": losses.detach().clone()})


def batches():
    generator = torch.Generator().manual_seed(0)
    for microbatch, length in enumerate(LENGTHS):
        yield microbatch, torch.randint(VOCABULARY, (SEQUENCES, length), generator=generator)


def found_by(model: Model, layout: Layout, is_packed: bool) -> Found:
    """What an evaluation that records routes gives, and a step that replays others."""
    use_ranks(layout)
    RouterReplay.clear_global_router_replay_instances()
    chunks = build(model, layout)
    chunks[0].config.variable_seq_lengths = True
    routes = Routes(layout, is_packed)
    recorded = []

    def record(_):
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)

    def note(_):
        recorded.append([each.clone() for each in RouterReplay.get_recorded_data()])

    def repeat(_):
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    run = partial(
        get_forward_backward_func(),
        model=chunks,
        num_microbatches=len(LENGTHS),
        seq_length=1,
        micro_batch_size=1 if is_packed else SEQUENCES,
        pg_collection=groups_of(layout),
    )
    with torch.no_grad():
        losses = run(
            forward_step_func=partial(forward_step, record, note, layout, is_packed),
            data_iterator=batches(),
            forward_only=True,
        )
    RouterReplay.clear_global_indices()
    losses += run(
        forward_step_func=partial(forward_step, routes.replay, repeat, layout, is_packed),
        data_iterator=batches(),
    )
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    gradients = {name: parameter.main_grad.clone() for name, parameter in named(chunks)}
    return Found(losses, gradients, recorded)


def require_equal(model: Model, layout: Layout, is_packed: bool, **settings: object) -> None:
    with patched([OWN_ATTENTION]):
        own = found_by(model, layout, is_packed)
    megatron.seq1f1b.install(segment_tokens=8, **settings)
    try:
        ours = found_by(model, layout, is_packed)
    finally:
        megatron.seq1f1b.uninstall()
    torch.testing.assert_close(ours.recorded, own.recorded, rtol=0, atol=0)
    assert len(own.recorded) == len(LENGTHS)
    torch.testing.assert_close(ours.losses, own.losses, rtol=1e-10, atol=1e-12)
    for name, gradient in ours.gradients.items():
        torch.testing.assert_close(gradient, own.gradients[name], rtol=1e-9, atol=1e-12)
    assert any(gradient.abs().max() > 1e-3 for gradient in ours.gradients.values())


@on_ranks(2)
def test_routes_are_replayed_by_segments():
    for model in (EXPERTS, RECOMPUTED):
        for is_packed in (False, True):
            require_equal(model, Layout(pipeline=2), is_packed)
    require_equal(RECOMPUTED, Layout(pipeline=2), True, pipeline_schedule="zb-h1")


@on_ranks(2)
def test_routes_are_divided_among_tensor_parallel_ranks():
    layout = Layout(tensor=2, sequence_parallel=True)
    for is_packed in (False, True):
        require_equal(RECOMPUTED, layout, is_packed)


@on_ranks(2)
def test_routes_are_divided_among_context_parallel_ranks():
    """As of whole sequences on one rank. Megatron scales the loss by the number of ranks, and then takes the mean."""
    layout = Layout(context=2)
    for is_packed in (False, True):
        with patched([OWN_ATTENTION]):
            own = found_by(EXPERTS, Layout(), is_packed)
        megatron.seq1f1b.install(segment_tokens=8)
        try:
            ours = found_by(EXPERTS, layout, is_packed)
        finally:
            megatron.seq1f1b.uninstall()
        for length, of_segments, of_whole in zip(LENGTHS, ours.recorded, own.recorded, strict=True):
            expected = [own_rows(rows, length, layout, is_packed) for rows in of_whole]
            torch.testing.assert_close(of_segments, expected, rtol=0, atol=0)
        for length, of_segments, of_whole in zip(2 * LENGTHS, ours.losses, own.losses, strict=True):
            expected = of_whole["loss"].view(SEQUENCES, length)[:, own_tokens(length, layout)]
            torch.testing.assert_close(of_segments["loss"].view_as(expected), expected, rtol=1e-10, atol=1e-12)
        for name, gradient in ours.gradients.items():
            dist.all_reduce(gradient)
            torch.testing.assert_close(gradient / layout.context, own.gradients[name], rtol=1e-9, atol=1e-12)
