"""Where the time of a predicted step goes."""

from ..costs.layer_times import layer_time, repeated_time
from ..simulator import Prediction

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
    setup, machine, busy = prediction.setup, prediction.machine, prediction.busy
    rank = max(range(len(busy)), key=busy.__getitem__)
    named = dict.fromkeys(_OF_LAYERS, 0.0)
    for stage in setup.placement.stages_of(rank):
        for layer, count in setup.stage_layers(stage).items():
            for span in setup.spans:
                time = layer_time(setup, machine, *span, layer)
                matmul, *others = (forward + back for forward, back in zip(time.forward, time.input, strict=True))
                repeated = repeated_time(setup, machine, *span, layer)
                for name, part in zip(_OF_LAYERS, (matmul + time.weight, *others, repeated), strict=True):
                    named[name] += setup.num_microbatches * count * part
    parts = {name: seconds for name, seconds in named.items() if seconds or name in _ALWAYS}
    # Where the host cannot launch kernels as fast as they end, the device waits for it.
    parts["embedding, head, host"] = busy[rank] - sum(parts.values())
    parts["bubble and messages"] = prediction.pipeline - busy[rank]
    parts["optimizer"] = max(end.update for end in prediction.ends)
    parts["gradients and parameters between replicas"] = (
        prediction.seconds - prediction.pipeline - parts["optimizer"] - machine.host.step
    )
    parts["outside the pipeline"] = machine.host.step
    return parts
