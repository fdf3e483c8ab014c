"""Where the time of a predicted step goes."""

from itertools import accumulate, pairwise

from ..costs.stage_times import layer_time
from ..simulator import Prediction
from ..simulator.lowered import compute_only


def breakdown(prediction: Prediction) -> dict[str, float]:
    """Seconds of the rank that computes most, by what they are spent on; together the iteration time."""
    setup, machine, timeline = prediction.setup, prediction.machine, compute_only(prediction.timeline)
    busy = [timeline.busy(rank) for rank in range(setup.pipeline_parallel)]
    rank = max(range(len(busy)), key=busy.__getitem__)
    times = [layer_time(setup, machine, *span) for span in pairwise(accumulate(setup.segments, initial=0))]
    layers = sum(setup.layers_per_stage[stage] for stage in setup.placement.stages_of(rank))
    recomputed = {
        "none": 0.0,
        "selective": sum(time.forward_attention for time in times),
        "full": sum(time.forward for time in times),
    }
    of_layers = {
        "matrix products": sum(time.forward_matmul + time.input_matmul + time.weight for time in times),
        "attention": sum(time.forward_attention + time.input_attention for time in times),
        "norms, activations, positions": sum(time.forward_other + time.input_other for time in times),
        "tensor-parallel collectives": sum(time.forward_exchange + time.input_exchange for time in times),
        "recomputation": recomputed[setup.recompute],
    }
    parts = {name: setup.num_microbatches * layers * seconds for name, seconds in of_layers.items()}
    # Where the host cannot launch kernels as fast as they end, the device waits for it.
    parts["embedding, head, host"] = busy[rank] - sum(parts.values())
    parts["bubble and messages"] = timeline.end - busy[rank]
    parts["optimizer"] = max(end.update for end in prediction.ends)
    parts["gradients and parameters between replicas"] = (
        prediction.seconds - timeline.end - parts["optimizer"] - machine.host.step
    )
    parts["outside the pipeline"] = machine.host.step
    return parts
