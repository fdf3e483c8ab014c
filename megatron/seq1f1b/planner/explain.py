"""Where the time of a predicted step goes."""

from itertools import accumulate, pairwise

from ..costs.stage_times import layer_time
from ..simulator import Prediction


def breakdown(prediction: Prediction) -> dict[str, float]:
    """Seconds of the rank that computes most, by what they are spent on; together the iteration time."""
    setup, machine, timeline = prediction.setup, prediction.machine, prediction.timeline
    busy = [timeline.busy(rank) for rank in range(setup.pipeline_parallel)]
    rank = max(range(len(busy)), key=busy.__getitem__)
    stages = setup.placement.stages_of(rank)
    times = [layer_time(setup, machine, *span) for span in pairwise(accumulate(setup.segments, initial=0))]
    scale = setup.num_microbatches * sum(setup.layers_per_stage[stage] for stage in stages)
    repeats = {"none": (0, 0), "selective": (0, 1), "full": (1, 1)}[setup.recompute]
    parts = {
        "matrix products": sum(t.forward_matmul + t.input_matmul + t.weight for t in times),
        "attention": sum(t.forward_attention + t.input_attention for t in times),
        "norms, activations, positions": sum(t.forward_other + t.input_other for t in times),
        "tensor-parallel collectives": sum(t.forward_exchange + t.input_exchange for t in times),
        "recomputation": repeats[0] * sum(t.forward - t.forward_attention for t in times)
        + repeats[1] * sum(t.forward_attention for t in times),
    }
    parts = {name: scale * seconds for name, seconds in parts.items()}
    # Longer than the kernels if the host is slower; shorter never.
    parts["embedding, head, host"] = max(busy[rank] - sum(parts.values()), 0.0)
    parts["bubble and messages"] = timeline.end - busy[rank]
    end = max(each.update for each in prediction.ends)
    parts["optimizer"] = end
    parts["gradients and parameters"] = prediction.seconds - timeline.end - end - machine.host.step
    parts["outside the pipeline"] = machine.host.step
    return parts
