"""From what segments cost on the stages of a model to what the actions of a schedule cost."""

from collections.abc import Sequence

from ...partition import segment_times
from ...schedule import Costs
from .stage_costs import StageCost


def action_costs(stages: Sequence[StageCost], layers_per_stage: Sequence[int], lengths: Sequence[int]) -> Costs:
    """Times of F, I and W in the unit of `stages`, for segments of `lengths` tokens; messages take no time.

    Activation memory is counted in tokens times layers. A W keeps as much as its F did: the inputs of the linear layers
    and their output gradients are together about as large as all that the forward of a layer saves.
    """
    forward, backward, weight = (
        tuple(tuple(segment_times(lengths, getattr(stage, part))) for stage in stages)
        for part in ("forward", "backward", "weight")
    )
    inputs = tuple(
        tuple(whole - part for whole, part in zip(*rows, strict=True)) for rows in zip(backward, weight, strict=True)
    )
    held = tuple(tuple(float(layers * length) for length in lengths) for layers in layers_per_stage)
    nothing = ((0.0,) * len(lengths),) * len(stages)
    return Costs(forward, inputs, weight, nothing, nothing, held, held)
