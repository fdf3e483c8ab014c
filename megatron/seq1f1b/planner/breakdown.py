"""Where the time of a predicted step goes.

Tested in planner/test_search.py.
"""

from ..costs.layer_times import layer_time, repeated_time
from ..costs.simulator import Prediction
from ..costs.stage_times import stage_rows

_OF_LAYERS = (
    "matrix products",
    "attention",
    "norms, activations, positions",
    "tensor-parallel collectives",
    "context-parallel collectives",
    "exchange of experts",
    "recomputation",
)


def breakdown(prediction: Prediction) -> dict[str, float]:
    """Seconds of the busiest rank by use; together they are the time of the iteration."""
    setup = prediction.setup
    machine = prediction.machine
    busy = prediction.busy
    rank = max(range(len(busy)), key=busy.__getitem__)
    named = dict.fromkeys(_OF_LAYERS, 0.0)
    for stage in setup.placement.stages_of(rank):
        for layer, count in setup.stages[stage].layers:
            for span in setup.spans:
                time = layer_time(setup, machine, *span, layer)
                matmul, *others = (forward + back for forward, back in zip(time.forward, time.input, strict=True))
                repeated = repeated_time(setup, machine, *span, layer)
                for name, part in zip(_OF_LAYERS, (matmul + time.weight, *others, repeated), strict=True):
                    named[name] += setup.num_microbatches * count * part
    # What pairs hide is missing in the time of the rank.
    rows = stage_rows(setup, machine)
    work = sum(sum(map(sum, rows[stage])) for stage in setup.placement.stages_of(rank))
    named["exchange of experts"] -= max(0.0, setup.num_microbatches * work - busy[rank]) if setup.hides_experts else 0.0
    # Collectives and recomputation are listed only where they take time.
    parts = {name: seconds for name, seconds in named.items() if seconds or name in _OF_LAYERS[:3]}
    # The device waits for the host where kernels end faster than the host launches them.
    parts["embedding, loss and host overhead"] = busy[rank] - sum(parts.values())
    parts["bubble and messages"] = prediction.pipeline - busy[rank]
    parts["optimizer"] = max(end.update for end in prediction.ends)
    rest = prediction.seconds - prediction.pipeline - parts["optimizer"] - machine.host.step
    parts["gradients and parameters between replicas"] = rest
    return parts | {"outside the pipeline": machine.host.step}
