"""Plans as text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..planning.costs.blocks import parameters_of_model
from ..planning.costs.flops import model_flops
from ..planning.costs.layer_times import layer_time, repeated_time
from ..planning.costs.machine import GIB
from ..planning.costs.training_setup import TrainingSetup
from ..planning.planner.search import Plan
from ..planning.planner.space import Question
from ..planning.planner.way_out import by_use
from ..planning.simulator.step import Prediction
from ..report.text import aligned
from ..schedule import FAMILIES, num_gathers


@dataclass(frozen=True)
class Gain:
    """What segments gain over the strongest opponent, Megatron's own schedules with all that they have: the seconds of
    the fastest step of either; None where nothing fits. `error` is the relative error of such predictions."""

    ours: float | None
    megatron: float | None
    error: float

    @property
    def value(self) -> float | None:
        """How much more throughput, relative; None unless both fit."""
        return None if self.ours is None or self.megatron is None else self.megatron / self.ours - 1

    @property
    def is_of_segments(self) -> bool:
        """Whether segments are worth having: only they fit, or they gain more than the error."""
        return self.megatron is None if self.value is None else self.value >= self.error

    def __str__(self) -> str:
        if self.value is None:
            only = "only segments fit" if self.ours else "only Megatron's own fit"
            return only if self.ours or self.megatron else "nothing fits"
        return f"{100 * self.value:+.1f} %{' (within error)' * (abs(self.value) < self.error)}"


def title(question: Question) -> str:
    billions = parameters_of_model(question.model) / 1e9
    return (
        f"{billions:.3g} B parameters on {question.num_devices} x {question.machine.device.name}, "
        f"{question.sequence_length} tokens, batch of {question.global_batch_size}, "
        f"{question.memory_limit:.1f} GiB a device, {question.room.host / GIB:.0f} of its host"
    )


def short_name(plan: Plan) -> str:
    """The sizes of a plan in a few letters, such as T8 P4 k4."""
    setup = plan.prediction.setup
    sizes = {
        "T": setup.tensor_parallel,
        "X": setup.context_parallel,
        "P": setup.pipeline_parallel,
        "C": setup.placement.num_chunks,
        "k": len(setup.segments),
    }
    words = [f"{letter}{size}" for letter, size in sizes.items() if size > 1]
    words += [setup.family] * (setup.family != "1f1b") + ["recompute"] * (setup.recompute != "none")
    words += ["partitioned"] * setup.partitions_state + ["offload"] * (setup.offloads > 0)
    return " ".join(words)


def _tflops(plan: Plan) -> float:
    """TFLOPS of a device by the model's own FLOPs: attention causal, nothing for recomputation."""
    setup, seconds = plan.prediction.setup, plan.prediction.seconds
    total = model_flops(setup.model, setup.sequence_length, setup.global_batch_size)
    return total / seconds / setup.num_devices / 1e12


def overview(plans: Sequence[Plan], megatron: Plan | None, given: Plan | None, question: Question) -> str:
    lines = ranking(plans, megatron, given, _row)
    if given is not None and given.memory_gib > question.memory_limit:
        fullest = max(given.prediction.memory, key=lambda rank: rank.total)
        lines.append(f"As given it does not fit: the fullest rank takes {by_use(fullest)}.")
    elif given is not None:
        longer = given.prediction.seconds / plans[0].prediction.seconds - 1
        lines.append(f"As given it fits, and takes {100 * longer:.1f} % longer than the best.")
    return "\n" + "\n".join(lines) + "\n"


def ranking[P](
    plans: Sequence[P], megatron: P | None, given: P | None, row: Callable[[P], Mapping[str, str]]
) -> list[str]:
    """One line per configuration; last are the best of Megatron's own schedules and the launch's own, where given."""
    named = [*enumerate(plans, start=1), ("Megatron", megatron), ("as given", given)]
    return with_heads([{"": str(name), **row(each)} for name, each in named if each is not None])


def with_heads(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A line of the names of the columns, and a line for each row."""
    return aligned([[*rows[0]], *([*row.values()] for row in rows)])


def parallel_sizes(setup: TrainingSetup) -> dict[str, str]:
    """Tensor, context, pipeline and data parallelism, and model chunks on a rank."""
    sizes = setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel
    return dict(zip(("TP", "CP", "PP", "DP", "C"), map(str, (*sizes, setup.placement.num_chunks)), strict=True))


def schedule_name(setup: TrainingSetup) -> str:
    return setup.family + ", shares" * setup.partitions_state if setup.pipeline_parallel > 1 else "-"


def _row(plan: Plan) -> Mapping[str, str]:
    prediction, setup = plan.prediction, plan.prediction.setup
    segments = len(setup.segments)
    return parallel_sizes(setup) | {
        "k": str(segments),
        "cut": plan.candidate.strategy if segments > 1 else "-",
        "schedule": schedule_name(setup),
        "m": str(setup.num_microbatches),
        "mb": str(setup.micro_batch_size),
        "recompute": setup.recompute,
        "offload": f"{setup.offloads:g}",
        "step s": f"{prediction.seconds:.3f}",
        "tokens/s": f"{prediction.tokens_per_second:.0f}",
        "TFLOPS": f"{_tflops(plan):.0f}",
        "bubble": f"{100 * prediction.bubble:.1f} %",
        "GiB": f"{plan.memory_gib:.1f}",
        "host GiB": f"{plan.host_gib:.1f}",
    }


def memory_by_stage(plan: Plan, question: Question) -> str:
    """One line per pipeline rank: its memory at the peak, by use."""
    setup = plan.prediction.setup
    lines = [f"Memory at the peak of each pipeline rank, of {question.memory_limit:.1f} GiB:"]
    if setup.partitions_state and setup.family in FAMILIES:
        gathers = num_gathers(FAMILIES[setup.family](setup.shape).order(0))
        lines.insert(0, f"The state is partitioned: rank 0 gathers weights of a model chunk {gathers} times a step.")
    for rank, memory in enumerate(plan.prediction.memory):
        layers = sum(setup.layers_per_stage[stage] for stage in setup.placement.stages_of(rank))
        static = memory.weights + memory.gradients + memory.optimizer
        moving = memory.total - static - memory.reserved
        lines.append(
            f"  rank {rank:2}, {layers} layers: {memory.total / GIB:5.1f} GiB = {static / GIB:.1f} weights, gradients, "
            f"optimizer + {moving / GIB:.1f} activations + {memory.reserved / GIB:.1f} held by the allocator"
        )
    return "\n".join(lines) + "\n"


def megatron_alone(found: Gain, megatron: Plan | None) -> str:
    """Whether Megatron's own schedules do as well; `megatron` is their best, None where they do not fit."""
    if megatron is None:
        return "Megatron's own schedules do not fit."
    taken = f"{found.megatron:.3f} s ({short_name(megatron) or 'data parallel'})"
    if found.is_of_segments:
        return f"Megatron's own schedules take {taken}: the gain over them is {found}."
    return f"Use Megatron's own schedules: they take {taken}, and the gain over them is {found}."


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
    """Seconds of the busiest rank by use; together they are the time of the iteration."""
    setup, machine, busy = prediction.setup, prediction.machine, prediction.busy
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


def explained(plans: Sequence[Plan]) -> str:
    """Where the time of the best goes, and of the second best if there is one."""
    best, *others = (breakdown(each.prediction) for each in plans[:2])
    names = dict.fromkeys(name for parts in (best, *others) for name in parts)
    lines = ["", f"{'Where the time goes, ms':42}{'best':>10}" + "".join(f"{'second':>10}{'more':>10}" for _ in others)]
    for name in names:
        seconds = best.get(name, 0.0)
        line = f"  {name:40}{1e3 * seconds:10.1f}"
        for other in others:
            line += f"{1e3 * other.get(name, 0.0):10.1f}{1e3 * (other.get(name, 0.0) - seconds):+10.1f}"
        lines.append(line)
    if others:
        worst = max(names, key=lambda name: others[0].get(name, 0.0) - best.get(name, 0.0))
        lines.append(f"The second best spends most of its difference on: {worst}.")
    return "\n".join(lines)
