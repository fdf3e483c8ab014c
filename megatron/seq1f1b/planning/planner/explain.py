"""Where the time of a predicted step goes."""

from dataclasses import replace
from itertools import accumulate, pairwise

from ..costs.layer_times import LayerTime, layer_time
from ..simulator import Prediction
from ..simulator.lowered import compute_only

_OF_LAYERS = (
    "matrix products",
    "attention",
    "norms, activations, positions",
    "tensor-parallel collectives",
    "context- and expert-parallel collectives",
    "recomputation",
)
# The others appear where they take time.
_ALWAYS = _OF_LAYERS[:3]


def breakdown(prediction: Prediction) -> dict[str, float]:
    """Seconds of the rank that computes most, by what they are spent on; together the iteration time."""
    setup, machine, timeline = prediction.setup, prediction.machine, compute_only(prediction.timeline)
    busy = [timeline.busy(rank) for rank in range(setup.pipeline_parallel)]
    rank = max(range(len(busy)), key=busy.__getitem__)
    kept, named = replace(setup, recompute="none"), dict.fromkeys(_OF_LAYERS, 0.0)
    for stage in setup.placement.stages_of(rank):
        for span in pairwise(accumulate(setup.segments, initial=0)):
            for has_experts, count in enumerate(setup.stage_layers[stage]):
                if count:
                    seconds = _of_layer(
                        layer_time(kept, machine, *span, has_experts=bool(has_experts)), setup.recompute
                    )
                    for name, part in zip(_OF_LAYERS, seconds, strict=True):
                        named[name] += setup.num_microbatches * count * part
    parts = {name: seconds for name, seconds in named.items() if seconds or name in _ALWAYS}
    # Where the host cannot launch kernels as fast as they end, the device waits for it.
    parts["embedding, head, host"] = busy[rank] - sum(parts.values())
    parts["bubble and messages"] = timeline.end - busy[rank]
    parts["optimizer"] = max(end.update for end in prediction.ends)
    parts["gradients and parameters between replicas"] = (
        prediction.seconds - timeline.end - parts["optimizer"] - machine.host.step
    )
    parts["outside the pipeline"] = machine.host.step
    return parts


def _of_layer(time: LayerTime, recompute: str) -> tuple[float, ...]:
    """Seconds of both directions, in the order of `_OF_LAYERS`."""
    both = (forward + back for forward, back in zip(time.forward, time.input, strict=True))
    matmul, *others = both
    repeated = {"none": 0.0, "selective": time.forward.attention, "full": time.forward.total}
    return (matmul + time.weight, *others, repeated[recompute])
