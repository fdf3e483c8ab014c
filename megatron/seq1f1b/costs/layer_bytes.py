"""The memory of layers and stages: what the forward of a unit keeps for its backward, and what actions hold. Bytes.

Activations follow arXiv 2205.05198, section 4 (34 bytes per token and hidden unit of a layer) in 16 bit; a recurrent
layer keeps what the kernels of flash-linear-attention and mamba-ssm save. Around products every tensor-parallel rank
holds the whole input and its gradient (section 4.2.2), elsewhere a part of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache, singledispatch
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schedule import COMPUTE_KINDS, Holds, Kind
from ..schedule.cost_tables import Table
from .blocks import BYTES, Block, blocks_of
from .training_setup import ALL_BUT_ATTENTION, FULL, Moves, StageLayers, TrainingSetup, of_stages

Sizes = NDArray[np.float64]


class Use(IntEnum):
    """What the memory of units and actions is used for: a column of an array of sizes. The names are those of the
    fields of `Memory`."""

    ACTIVATIONS = 0
    KEYS_VALUES = 1  # with their gradients
    STATES = 2  # of recurrent layers
    LOGITS = 3
    WORKING = 4  # only while an action runs; units keep none


_KEPT_USES = (Use.ACTIVATIONS, Use.KEYS_VALUES, Use.STATES, Use.LOGITS)


class Phase(IntEnum):
    """When an action changes what is held: a row of the array of `changes_of`."""

    STARTS = 0
    RUNS = 1  # held from its start to its end
    ENDS = 2


@singledispatch
def layer_activation(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What a layer keeps of the segment [start, end) for its backward, without what passes between segments."""
    residual = setup.residual(end - start)
    share = setup.recomputed_share
    if setup.recompute == FULL:
        kept = layer_activation(replace(setup, recompute="none"), layer, start, end) if share < 1 else 0.0
        return share * residual + (1 - share) * kept
    if setup.recompute == ALL_BUT_ATTENTION:
        return residual + setup.rows(end - start) * sum(block.attended for block in setup.blocks(layer))
    return sum(_kept_of_block(setup, block, end - start) for block in setup.blocks(layer))


def _kept_of_block(setup: TrainingSetup, block: Block, length: int) -> float:
    """Bytes that a block keeps: its input, the normalised input of its first product, and its inner activations."""
    again = setup.recompute.split()
    inside = 0.0 if setup.repeats(block.symbol) else block.kept - _computed_again(block, again)
    if block.attention is not None and setup.context_parallel > 1 and len(setup.segments) > 1:
        # Attention keeps its output by heads, and the projection behind it by tokens.
        inside += BYTES * block.attention.heads * block.attention.value_dim
    inputs = 1 if "layernorm" in again else 2
    return inputs * setup.residual(length) + setup.rows(length) * inside


def _computed_again(block: Block, modules: Sequence[str]) -> float:
    """Bytes for each token that Megatron's modules for parts of a block compute again instead of keeping them."""
    spared = 0.0
    if "moe_act" in modules:
        spared += block.activated
    if "shared_experts" in modules and block.expert and block.products:
        first, last = block.products
        spared += BYTES * (first.outputs + last.inputs)
    if "mla_up_proj" in modules and block.symbol == "+" and block.attention is not None:
        spared += BYTES * block.attention.heads * block.attention.score_dim
    return spared


def layer_kept_for_weights(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What is left for the weight gradients of a segment: inputs of products and gradients of their outputs, 32 bytes
    per token and hidden unit (arXiv 2401.10241, table 1). With sequence parallelism every rank has the gradient of a
    block's output for all tokens; the tokens of routed experts are kept once for each expert."""
    hidden = setup.model.hidden_size
    kept = 0.0
    for block in blocks_of(setup.model, layer):
        if block.products:
            kept += hidden / setup.token_shares + hidden
        inside = sum(product.outputs for product in block.products[:-1])
        for product in block.products:
            if product.inputs != hidden or product.shared == "inputs":
                inside += product.inputs
        if block.expert:
            first, last = block.expert
            inside += block.active * (2 * hidden + first.outputs + last.inputs)
        kept += inside / setup.tensor_parallel
    return BYTES * setup.rows(end - start) * kept


@singledispatch
def layer_keys_values(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """Keys and values that the segment [start, end) leaves for its backward. The buffer of a whole micro-batch counts
    with its first segment, which goes backward last. With a window every segment has its own; only a window of them
    stays where layers are computed again."""
    if len(setup.segments) == 1 and setup.recomputes_up_projections:
        tokens = 0.0
    elif len(setup.segments) == 1:
        tokens = (end - start) * (1 - setup.recomputed_share if setup.recomputes_layers else 1)
    elif (window := setup.model.window_of(layer)) is not None:
        tokens = min(end - start, window) if setup.recomputes_layers else end - start
    else:
        tokens = setup.sequence_length if start == 0 else 0
    return BYTES * keys_values_of(setup, layer, tokens)


@singledispatch
def layer_keys_values_gradients(setup: TrainingSetup, layer: int) -> float:
    """Bytes of the gradients of earlier segments' keys and values, in a buffer from the first backward of a micro-batch
    to its last."""
    earlier = setup.sequence_length - setup.segments[-1]
    window = setup.model.window_of(layer)
    return 4 * keys_values_of(setup, layer, earlier if window is None else min(earlier, window))


class MovedBytes(NamedTuple):
    """Bytes of a layer that Megatron moves to the host."""

    activations: float
    keys_values: float


def layer_moved(setup: TrainingSetup, layer: int, start: int, end: int) -> MovedBytes:
    """What Megatron moves of the segment [start, end) of a layer. If it moves some of the layers, each layer counts
    with the share of layers that move."""
    if not setup.moves_parts:
        return MovedBytes(0.0, 0.0)
    keys_values = layer_keys_values(setup, layer, start, end)
    if setup.moves is Moves.MODULES:
        activations = _moved_by_modules(setup, layer, end - start)
    else:
        activations = layer_activation(setup, layer, start, end)
    return MovedBytes(setup.offloads * activations, setup.offloads * keys_values)


def _moved_by_modules(setup: TrainingSetup, layer: int, length: int) -> float:
    """The activations of --offload-modules: all of attention and experts, only the input of other blocks and of experts
    that are computed again; none of layers that are."""
    if setup.recomputes_layers:
        return 0.0
    activations = 0.0
    for block in setup.blocks(layer):
        if block.symbol == "-" or setup.repeats(block.symbol):
            activations += setup.residual(length)
        elif block.symbol in "*+E":
            activations += _kept_of_block(setup, block, length)
    return activations


def stage_moved(setup: TrainingSetup, stage: StageLayers, start: int, end: int) -> float:
    """Bytes that Megatron moves to the host of the segment [start, end) on a stage."""
    return sum(count * sum(layer_moved(setup, layer, start, end)) for layer, count in stage.layers)


def layer_state(setup: TrainingSetup, layer: int) -> float:
    """Bytes of the state that a recurrent layer passes from one segment to the next."""
    return setup.rows(1) * sum(block.state for block in setup.blocks(layer))


def keys_values_of(setup: TrainingSetup, layer: int, tokens: float) -> float:
    """How many numbers the keys and values of `tokens` tokens of every sequence have on a rank."""
    if (attention := setup.blocks(layer)[0].attention) is None:
        return 0.0
    # Context-parallel ranks share whole sequences, but the heads of segments; surplus ranks have one each.
    shares = setup.context_parallel if len(setup.segments) == 1 else min(setup.context_parallel, attention.kv_heads)
    return attention.keys_values / shares * setup.micro_batch_size * tokens


# Bytes of a logit: in 16 bit with its exponential in 32 bit; the exponential, which the backward needs; the gradient in
# 16 bit, which the weight gradients need.
_LOGIT = 6
_LOGIT_KEPT = 4
_LOGIT_KEPT_FOR_WEIGHTS = BYTES
PIECE = 2**26  # logits of a piece, as in model/memory/loss_pieces.py
MOST_KEPT = 8 * PIECE  # the most logits of a micro-batch that are kept


def logits(setup: TrainingSetup, length: int) -> float:
    """How many logits a segment of `length` tokens has on a rank, with those of prediction heads."""
    model = setup.model
    return (1 + model.prediction_depth) * setup.rows(length) * model.vocab_size / setup.tensor_parallel


def keeps_logits(setup: TrainingSetup) -> bool:
    """Whether the loss is not taken in pieces."""
    return setup.keeps_logits or logits(setup, setup.longest or setup.sequence_length) <= MOST_KEPT


class HeadBytes(NamedTuple):
    """Bytes that the projection to the vocabulary and the loss keep of a segment."""

    hidden_states: float  # around the last norm
    loss: float  # logits, or one number for each token if the loss is taken in pieces


def head_kept(setup: TrainingSetup, length: int, for_weights: bool = False) -> HeadBytes:
    """What the last stage keeps of a segment for its backward, or only for its weight gradients, for which a loss in
    pieces keeps nothing."""
    heads = 1 + setup.model.prediction_depth
    hidden_states = heads * setup.residual(length)
    num_logits = logits(setup, length)
    if for_weights:
        if not keeps_logits(setup):
            return HeadBytes(0.0, 0.0)
        return HeadBytes(hidden_states, _LOGIT_KEPT_FOR_WEIGHTS * num_logits)
    loss = _LOGIT_KEPT * num_logits if keeps_logits(setup) else 4 * heads * setup.rows(length)
    return HeadBytes(2 * hidden_states, loss)


@singledispatch
def loss_bytes(setup: TrainingSetup, length: int, is_forward: bool = True) -> float:
    """Bytes at most of logits and the loss, for a segment of `length` tokens. The backward of a piece computes its
    logits again, and a gradient of the projection to the vocabulary, beside the gradients of hidden states."""
    of_segment = logits(setup, length)
    if keeps_logits(setup):
        return _LOGIT * of_segment
    of_piece = min(PIECE, of_segment)
    weights = BYTES * setup.embedding_parameters
    if is_forward:
        return _LOGIT * of_piece
    return setup.residual(length) + max(_LOGIT * of_piece, _LOGIT_KEPT_FOR_WEIGHTS * of_piece + weights)


def routed_bytes(setup: TrainingSetup, blocks: Iterable[Block], length: int) -> float:
    """Tokens on the way to experts of one of these blocks, beside what is kept: sorted, sent, sorted, returned."""
    active = max((block.active for block in blocks), default=0)
    return 4 * setup.whole_input(length) / setup.tensor_parallel * active


@singledispatch
def backward_working(setup: TrainingSetup, stage: StageLayers, start: int, end: int) -> float:
    """The largest working memory of a layer of the stage in the backward of the segment [start, end); not the loss."""
    return max((_layer_working(setup.layer_setup, layer, start, end) for layer, _ in stage.layers), default=0.0)


@lru_cache(maxsize=1 << 16)
def _layer_working(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """Blocks go backward in reverse, beside what they and earlier ones kept or computed again."""
    length = end - start
    blocks = setup.blocks(layer)
    without = replace(setup, recompute="none")
    now = most = 0.0
    if setup.recomputes_layers:
        stays = sum(block.attended for block in blocks) if setup.recompute == ALL_BUT_ATTENTION else 0
        now = sum(_kept_of_block(without, block, length) for block in blocks) - setup.rows(length) * stays
        if len(setup.segments) == 1:
            now += BYTES * keys_values_of(setup, layer, length)
    for block in reversed(blocks):
        computed = _kept_of_block(without, block, length)
        kept = _kept_of_block(setup, block, length)
        if setup.recomputes_up_projections and len(setup.segments) == 1 and block.symbol == "+":
            computed += BYTES * keys_values_of(setup, layer, length)
        working = max(_around_products(setup, block, length), block_working(setup, layer, block, start, end))
        if setup.recomputes_layers or computed > kept:
            working = max(working, routed_bytes(setup, (block,), length))
        most = max(most, now + computed - kept + working)
        now -= kept
    return setup.residual(length) + most


def _around_products(setup: TrainingSetup, block: Block, length: int) -> float:
    """What the backward holds around the products of a block, beside what the block kept. With sequence parallelism
    the last product gathers the gradient of its output, the first one its input."""
    rows = setup.rows(length)
    whole = setup.whole_input(length)
    kept = rows * block.kept
    gathered = part = 0.0
    if setup.token_shares > 1:
        gathered = whole
        part = setup.residual(length)
    if len(block.products) != 2 or block.experts or block.scan:
        return kept + whole + gathered + part
    first, last = block.products
    outputs = BYTES * rows * first.outputs
    inputs = BYTES * rows * last.inputs
    return max(gathered + inputs, outputs, outputs - kept + whole + gathered + part)


@singledispatch
def block_working(setup: TrainingSetup, layer: int, block: Block, start: int, end: int) -> float:
    """What the backward holds between the products of a block, beside what the block kept."""
    if block.attention is None:
        return 0.0
    returned = BYTES * keys_values_of(setup, layer, setup.model.keys_given(layer, start, end))
    return setup.rows(end - start) * block.kept + returned + _of_kernel(setup, layer, start, end)


def _of_kernel(setup: TrainingSetup, layer: int, start: int, end: int) -> float:
    """What the backward of attention frees at its end: gradients of queries in 32 bit (flash_api.cpp of FlashAttention
    2), and, where heads share keys and values, gradients of these for each head of the queries."""
    given = setup.model.keys_given(layer, start, end)
    attention = setup.blocks(layer)[0].attention
    if attention is None:
        return 0.0
    of_queries = 4 * setup.rows(end - start) * attention.heads * attention.score_dim
    for_each = setup.rows(given) * attention.heads * (attention.score_dim + attention.value_dim)
    shares_heads = for_each > keys_values_of(setup, layer, given)
    return of_queries + BYTES * for_each if shares_heads else of_queries


@lru_cache(maxsize=4096)
def unit_bytes(setup: TrainingSetup, stage: StageLayers, holds: Holds = Holds.ACTIVATIONS) -> Sizes:
    """What the units of a stage keep while they hold this. [segments, _KEPT_USES]."""
    if setup.parts:
        return np.concatenate([unit_bytes(part, stage, holds) for part in setup.parts])
    sizes = np.zeros((len(setup.segments), len(_KEPT_USES)))
    if holds is Holds.NOTHING:
        return sizes
    if holds is Holds.ON_HOST:
        for use in (Use.KEYS_VALUES, Use.STATES):
            sizes[:, use] = unit_bytes(setup, stage)[:, use]
        # The last segment takes the keys and values of all along.
        sizes[-1, Use.KEYS_VALUES] -= sizes[:, Use.KEYS_VALUES].sum()
        return sizes
    if stage.is_last:
        for segment, (start, end) in enumerate(setup.spans):
            of_head = head_kept(setup, end - start, for_weights=holds is Holds.FOR_WEIGHTS)
            sizes[segment, Use.ACTIVATIONS] = of_head.hidden_states
            sizes[segment, Use.LOGITS] = of_head.loss
    for layer, count in stage.layers:
        sizes += count * _layer_kept(setup.layer_setup, layer, holds)
    return sizes


@lru_cache(maxsize=1 << 14)
def _layer_kept(setup: TrainingSetup, layer: int, holds: Holds) -> Sizes:
    """What the units of a layer keep while they hold this. [segments, _KEPT_USES]."""
    sizes = np.zeros((len(setup.segments), len(_KEPT_USES)))
    for segment, (start, end) in enumerate(setup.spans):
        if holds is Holds.FOR_WEIGHTS:
            sizes[segment, Use.ACTIVATIONS] = layer_kept_for_weights(setup, layer, start, end)
            continue
        moved = layer_moved(setup, layer, start, end)
        sizes[segment, Use.ACTIVATIONS] = layer_activation(setup, layer, start, end) - moved.activations
        sizes[segment, Use.KEYS_VALUES] = layer_keys_values(setup, layer, start, end) - moved.keys_values
        sizes[segment, Use.STATES] = layer_state(setup, layer) if end < setup.sequence_length else 0.0
    return sizes


@lru_cache(maxsize=1024)
def moved_bytes(setup: TrainingSetup) -> Table:
    """What a unit has in the memory of the host, or what Megatron's modules move of it, by stage and segment."""

    def row(stage: StageLayers) -> tuple[float, ...]:
        if setup.moves_parts:
            return tuple(stage_moved(setup, stage, *span) for span in setup.spans)
        moved = unit_bytes(setup, stage) - unit_bytes(setup, stage, Holds.ON_HOST)
        return tuple(moved.sum(axis=1).tolist())

    return tuple(of_stages(setup.model, setup.layers_per_stage, row))


@lru_cache(maxsize=4096)
def changes_of(setup: TrainingSetup, stage: StageLayers, kind: Kind) -> Sizes:
    """What an action adds when it starts, holds while it runs, and adds when it ends. [segments, Phase, Use]."""
    if setup.parts:
        return np.concatenate([changes_of(part, stage, kind) for part in setup.parts])
    changes = np.zeros((len(setup.segments), len(Phase), len(Use)))
    facts = kind.facts
    # A forward makes what it keeps; others free, or bring back, when they end.
    phase = Phase.STARTS if kind is Kind.F else Phase.ENDS
    changes[:, phase, _KEPT_USES] += unit_bytes(setup, stage, facts.after) - unit_bytes(setup, stage, facts.before)
    if kind in COMPUTE_KINDS:
        for segment, (start, end) in enumerate(setup.spans):
            running = running_bytes(setup, stage, kind, start, end)
            changes[segment, Phase.RUNS, Use.LOGITS] = running.loss
            changes[segment, Phase.RUNS, Use.WORKING] = running.working
    if facts.gives_input_gradient:
        # Gradients of the keys and values of earlier segments arise in the backward of the last segment, partly in
        # place of what attention's kernel held, and go with the first.
        in_all = 0.0
        in_place = 0.0
        for layer, count in stage.layers:
            gradients = layer_keys_values_gradients(setup, layer)
            in_all += count * gradients
            in_place = max(in_place, min(_of_kernel(setup, layer, *setup.spans[-1]), gradients))
        changes[-1, Phase.STARTS, Use.KEYS_VALUES] += in_all - in_place
        changes[-1, Phase.ENDS, Use.KEYS_VALUES] += in_place
        changes[0, Phase.ENDS, Use.KEYS_VALUES] -= in_all
    return changes


class RunningBytes(NamedTuple):
    """Bytes that an action holds while it runs, beside what units keep."""

    loss: float
    working: float  # all else


def running_bytes(setup: TrainingSetup, stage: StageLayers, kind: Kind, start: int, end: int) -> RunningBytes:
    """What an action of this kind on the segment [start, end) holds while it runs."""
    length = end - start
    has_loss = stage.is_last and kind is not Kind.W
    loss = loss_bytes(setup, length, kind is Kind.F) if has_loss else 0.0
    # Tokens have come back from experts when the loss begins.
    blocks = (block for layer, _ in stage.layers for block in setup.blocks(layer))
    routed = max(0.0, routed_bytes(setup, blocks, length) - loss) if kind is Kind.F else 0.0
    kept = head_kept(setup, length)
    if has_loss and keeps_logits(setup):  # these are counted with the unit
        loss -= kept.loss
    # Two layers are on their way, or at work: with modules each as far as it moves, else whole layers, of which
    # `layer_moved` has a share.
    num_layers = 2.0
    if setup.moves is Moves.LAYERS and setup.offloads:
        num_layers /= setup.offloads
    moving = num_layers * max((sum(layer_moved(setup, layer, start, end)) for layer, _ in stage.layers), default=0.0)
    if not kind.facts.gives_input_gradient:
        return RunningBytes(loss, moving + setup.whole_input(length) + routed)
    working = moving + backward_working(setup, stage, start, end)
    if has_loss:  # its backward ends before that of the layers begins
        working -= loss + kept.loss + kept.hidden_states
        if kind.facts.after is Holds.FOR_WEIGHTS:
            working += sum(head_kept(setup, length, for_weights=True))
    return RunningBytes(loss, max(0.0, working))
