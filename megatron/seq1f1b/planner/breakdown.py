"""Where the time of a predicted step goes.

Tested in planner/test_search.py.
"""

from ..costs.layer_times import layer_time, repeated_time
from ..costs.simulator import Prediction
from ..costs.stage_times import stage_rows

# The parts of a layer: the fields of `Parts` in their order, and what is computed again.
_OF_LAYERS = (
    "matrix products",
    "attention",
    "norms, activations, positions",
    "tensor-parallel collectives",
    "context-parallel collectives",
    "exchange of experts",
    "recomputation",
)
_ALWAYS_LISTED = _OF_LAYERS[:3]


def breakdown(prediction: Prediction) -> dict[str, float]:
    """Seconds of the busiest rank by use; together they are the time of the iteration."""
    setup = prediction.setup
    machine = prediction.machine
    rank = max(range(setup.pipeline_parallel), key=lambda rank: prediction.busy[rank])
    busy = prediction.busy[rank]
    of_layers = dict.fromkeys(_OF_LAYERS, 0.0)
    for stage in setup.placement.stages_of(rank):
        for layer, count in setup.stages[stage].layers:
            for start, end in setup.spans:
                time = layer_time(setup, machine, start, end, layer)
                parts = [forward + back for forward, back in zip(time.forward, time.input, strict=True)]
                parts[0] += time.weight
                parts.append(repeated_time(setup, machine, start, end, layer))
                for use, seconds in zip(_OF_LAYERS, parts, strict=True):
                    of_layers[use] += setup.num_microbatches * count * seconds
    if setup.hides_experts:  # what pairs hide is missing in the time of the rank
        rows = stage_rows(setup, machine)
        work = sum(sum(map(sum, rows[stage])) for stage in setup.placement.stages_of(rank))
        of_layers["exchange of experts"] -= max(0.0, setup.num_microbatches * work - busy)
    # Collectives and recomputation are listed only where they take time.
    uses = {use: seconds for use, seconds in of_layers.items() if seconds or use in _ALWAYS_LISTED}
    # The device waits for the host where kernels end faster than the host launches them.
    uses["embedding, loss and host overhead"] = busy - sum(uses.values())
    uses["bubble and messages"] = prediction.pipeline - busy
    uses["optimizer"] = max(end.update for end in prediction.ends)
    rest = prediction.seconds - prediction.pipeline - uses["optimizer"] - machine.host.step
    uses["gradients and parameters between replicas"] = rest
    uses["outside the pipeline"] = machine.host.step
    return uses
