"""Plans as text.

Tested in commands/test_plan.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from ..costs.blocks import model_flops, parameters_of_model
from ..costs.machine import GIB
from ..costs.training_setup import Fsdp, TrainingSetup
from ..planner.breakdown import breakdown
from ..planner.gain import Gain
from ..planner.search import Plan
from ..planner.space import Question
from ..planner.unit_search import UnitPlan, UnitSearch
from ..planner.way_out import by_use
from ..report.text import aligned


def title(question: Question) -> str:
    billions = parameters_of_model(question.model) / 1e9
    return (
        f"{billions:.3g} B parameters on {question.num_devices} x {question.machine.device.name}, "
        f"{question.sequence_length} tokens, batch of {question.global_batch_size}, "
        f"{question.memory_limit:.1f} GiB a device, {question.budget.host / GIB:.0f} GiB of its host"
    )


def title_of_units(search: UnitSearch) -> str:
    counts = search.histogram
    asked = search.question
    drawn = sorted(chain(*search.steps))
    return (
        f"{sum(counts.values()):,} sequences of {min(counts):,} to {max(counts):,} tokens, "
        f"{search.tokens / asked.global_batch_size:,.0f} on average, half of them up to {drawn[len(drawn) // 2]:,}; "
        f"steps of {asked.global_batch_size} on {asked.num_devices} x {asked.machine.device.name}, "
        f"{asked.memory_limit:.1f} GiB a device. Means over {len(search.steps)} steps; memory is that of a step with "
        "the longest sequence."
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
    if setup.family != "1f1b":
        words.append(setup.family)
    if setup.recompute != "none":
        words.append("recompute")
    if setup.partitions_state:
        words.append("partitioned")
    words += _fsdp(setup)
    if setup.replays_layers:
        words.append("graphs")
    if setup.offloads > 0:
        words.append("offload")
    return " ".join(words)


def _fsdp(setup: TrainingSetup) -> list[str]:
    """FSDP, with what it shards beside the state of the optimizer unless that is all."""
    if setup.fsdp is Fsdp.OFF:
        return []
    return ["FSDP"] if setup.fsdp is Fsdp.PARAMETERS else [f"FSDP {setup.fsdp}"]


def with_header(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A line with the names of the columns, and a line for each row."""
    names = list(rows[0])
    return aligned([names, *(list(row.values()) for row in rows)])


def ranking(
    plans: Sequence[Plan], megatron: Plan | None, given: Plan | None, row: Callable[[Any], Mapping[str, str]]
) -> list[str]:
    """A line for each configuration, for the best of Megatron's own schedules, and for the launch as given."""
    named: dict[str, Plan | None] = {str(number): plan for number, plan in enumerate(plans, start=1)}
    named |= {"Megatron": megatron, "as given": given}
    return with_header([{"": name, **row(plan)} for name, plan in named.items() if plan is not None])


def of_launch(given: Plan, advised: Plan, limit: float) -> str:
    """Whether the launch as given fits, and how it compares with what is advised."""
    if given.memory_gib > limit:
        fullest = max(given.prediction.memory, key=lambda rank: rank.total)
        return f"As given it does not fit: the fullest rank takes {by_use(fullest)}."
    longer = advised.tokens_per_second / given.tokens_per_second - 1
    return f"As given it fits, and takes {100 * longer:.1f} % longer than what is advised."


def parallel_sizes(setup: TrainingSetup) -> dict[str, str]:
    """Tensor, context, pipeline and data parallelism, and model chunks on a rank."""
    return {
        "TP": str(setup.tensor_parallel),
        "CP": str(setup.context_parallel),
        "PP": str(setup.pipeline_parallel),
        "DP": str(setup.data_parallel),
        "C": str(setup.placement.num_chunks),
    }


def _schedule(setup: TrainingSetup) -> str:
    words = [] if setup.pipeline_parallel == 1 else [setup.family]
    if setup.partitions_state:
        words.append("shares")
    words += _fsdp(setup)
    if setup.replays_layers:
        words.append("graphs")
    return ", ".join(words) or "-"


def _moving(setup: TrainingSetup) -> str:
    words = f"{setup.offloads:g}"
    if setup.offloads and setup.moves_parts:
        words += f" of {setup.moves}"
    if setup.moves_by_layer:
        words += " by layer"
    return words


def row(plan: Plan) -> Mapping[str, str]:
    """The columns of a plan: first what is predicted, since narrow windows cut lines, then its layout. TFLOPS are those
    of a device by the model's own FLOPs: attention causal, nothing for recomputation."""
    setup = plan.prediction.setup
    segments = len(setup.segments)
    flops = model_flops(setup.model, setup.sequence_length, setup.global_batch_size)
    flops_of_device = flops / plan.seconds / setup.num_devices
    return {
        "step s": f"{plan.seconds:.3f}",
        "tokens/s": f"{plan.tokens_per_second:.0f}",
        "TFLOPS": f"{flops_of_device / 1e12:.0f}",
        "MFU": f"{100 * flops_of_device / plan.prediction.machine.device.peak_flops:.0f} %",
        "bubble": f"{100 * plan.prediction.bubble:.1f} %",
        "GiB": f"{plan.memory_gib:.1f}",
        "host GiB": f"{plan.host_gib:.1f}",
        **parallel_sizes(setup),
        "k": str(segments),
        "cut": plan.candidate.strategy if segments > 1 else "-",
        "schedule": _schedule(setup),
        "m": str(setup.num_microbatches),
        "mb": str(setup.micro_batch_size),
        "recompute": setup.recompute,
        "offload": _moving(setup),
    }


def row_of_units(search: UnitSearch, plan: UnitPlan) -> Mapping[str, str]:
    """The columns of a plan in units, as those of `row`."""
    setup = plan.prediction.setup
    asked = search.question
    units = plan.candidate.unit_tokens
    lengths = Counter(chain(*search.steps))
    flops = sum(model_flops(asked.model, length, count) for length, count in lengths.items()) / len(search.steps)
    seconds = search.tokens / plan.tokens_per_second
    return {
        "step s": f"{seconds:.3f}",
        "tokens/s a GPU": f"{plan.tokens_per_second / asked.num_devices:.0f}",
        "TFLOPS": f"{flops / seconds / asked.num_devices / 1e12:.0f}",
        "bubble": f"{100 * plan.bubble:.1f} %",
        "padding": f"{100 * plan.padding:.1f} %",
        "GiB": f"{plan.memory_gib:.1f}",
        **parallel_sizes(setup),
        "unit": f"{setup.sequence_length} packs" if units is None else str(units),
        "schedule": _schedule(setup),
        "recompute": setup.recompute,
    }


def memory_by_stage(plan: Plan, question: Question) -> str:
    """A line for each pipeline rank: its memory at the peak, by use."""
    setup = plan.prediction.setup
    lines = [f"Memory at the peak of each pipeline rank, of {question.memory_limit:.1f} GiB:"]
    for rank, memory in enumerate(plan.prediction.memory):
        layers = sum(setup.layers_per_stage[stage] for stage in setup.placement.stages_of(rank))
        static = memory.weights + memory.gradients + memory.optimizer
        moving = memory.total - static - memory.reserved
        lines.append(
            f"  rank {rank:2}, {layers} layers: {memory.total / GIB:5.1f} GiB = {static / GIB:.1f} weights, gradients, "
            f"optimizer + {moving / GIB:.1f} activations + {memory.reserved / GIB:.1f} held by the allocator"
        )
    return "\n".join([*lines, ""])


def verdict(gain: Gain, megatron: Plan | None) -> str:
    """Whether Megatron's own schedules do as well; `megatron` is their best, None where they do not fit."""
    if megatron is None:
        return "Megatron's own schedules do not fit."
    taken = f"{megatron.seconds:.3f} s a step"
    if gain.is_of_segments:
        return f"Megatron's own schedules take {taken}: this package is {_pace(gain)}."
    if gain.ours is None:
        return f"Use Megatron's own schedules: they take {taken}, and no plan of this package fits."
    return f"Use Megatron's own schedules: they take {taken}, and the best plan of this package is {_pace(gain)}."


def ended_early(least_seconds: float) -> str:
    """That the best plan of this package may take less than the one shown."""
    return (
        "The search for the best plan of this package ended early. But for auto, and layers moved between stages, none "
        f"takes less than {least_seconds:.3f} s, or gains more over Megatron's own than predictions are off."
    )


def verdict_on_units(gain: Gain, megatron: Plan | None) -> str:
    """Whether Megatron's own schedules do as well on packs as long as the longest sequence."""
    packs = "packs as long as the longest sequence"
    if megatron is None:
        return f"Megatron's own schedules do not hold {packs}."
    if gain.is_of_segments:
        return f"Units are {_pace(gain)} than Megatron's own schedules on {packs}."
    number = megatron.candidate.setup.global_batch_size
    if gain.ours is None:
        return f"Use Megatron's own schedules on {packs}, {number} a step: no plan of units fits."
    return f"Use Megatron's own schedules on {packs}, {number} a step: units are {_pace(gain)}."


def _pace(gain: Gain) -> str:
    """How much more or fewer tokens/s segments have than Megatron's own schedules, where both fit."""
    assert gain.value is not None
    percent = f"{100 * abs(gain.value):.1f} % {'faster' if gain.value >= 0 else 'slower'}"
    if abs(gain.value) >= gain.error:
        return percent
    return f"{percent}, which is less than predictions are off in the mean ({100 * gain.error:.1f} %)"


# What makes a step spend less on a part of it; parts that a user cannot make smaller are not here.
_CURES = {
    "tensor-parallel collectives": "with faster links within a node",
    "context-parallel collectives": "with a faster network between nodes",
    "exchange of experts": "with a faster network between nodes",
    "recomputation": "with more memory on a device or on its host",
    "bubble and messages": "with more sequences a step",
    "gradients and parameters between replicas": "with a faster network between nodes, or more sequences a step",
}


def reason(ours: Plan, megatron: Plan, gain: Gain) -> str:
    """The GPU hours of both plans and, where they differ by more than the error, what the slower one spends most of the
    difference on, and what would help it."""
    hours = (
        f"A billion tokens take {_gpu_hours(ours):,.4g} GPU hours with this package, {_gpu_hours(megatron):,.4g} with "
        "Megatron's own schedules."
    )
    if gain.value is None or abs(gain.value) < gain.error:
        return hours
    if ours.seconds <= megatron.seconds:
        faster = ours
        slower = megatron
        slower_spends = "Megatron's own schedules spend"
    else:
        faster = megatron
        slower = ours
        slower_spends = "this package spends"
    of_faster = breakdown(faster.prediction)
    of_slower = breakdown(slower.prediction)
    more = {name: of_slower.get(name, 0.0) - of_faster.get(name, 0.0) for name in of_faster | of_slower}
    most = max(more, key=more.__getitem__)
    cure = f"; {_CURES[most]} that shrinks" if most in _CURES else ""
    return f"{hours} The largest part of the difference: {slower_spends} {more[most]:.3f} s more on {most}{cure}."


def _gpu_hours(plan: Plan) -> float:
    """Hours of all devices for a billion tokens."""
    return plan.prediction.setup.num_devices / plan.tokens_per_second * 1e9 / 3600


def flags_of_both(
    advised: Plan, other: Plan | None, megatron: Plan | None, flags_of: Callable[[Plan], Sequence[str]]
) -> str:
    """The flags that two plans share, then the others of each, first those of what is advised. The other plan is left
    out if there is none, or if they differ only in whose schedule runs."""
    flags = flags_of(advised)
    if other is None:
        return f"Flags of {_side(advised, megatron)}:{in_lines(flags)}"
    flags_of_other = flags_of(other)
    shared = [flag for flag in flags if flag in flags_of_other]
    own = [flag for flag in flags if flag not in shared]
    own_of_other = [flag for flag in flags_of_other if flag not in shared]
    if all(flag.startswith("--pipeline-schedule ") for flag in own + own_of_other):
        same = f"The best plan of {_name(other, megatron)} has the same layout."
        return f"Flags of {_side(advised, megatron)}:{in_lines(flags)}\n{same}"
    return (
        f"Flags of both:{in_lines(shared)}\n"
        f"+ {_side(advised, megatron)}:{in_lines(own)}\n"
        f"+ {_side(other, megatron)}:{in_lines(own_of_other)}"
    )


def _name(plan: Plan, megatron: Plan | None) -> str:
    return "Megatron's own schedules" if plan is megatron else "this package"


def _side(plan: Plan, megatron: Plan | None) -> str:
    return f"{_name(plan, megatron)}, {plan.tokens_per_second:,.0f} tokens/s"


def in_lines(flags: Sequence[str]) -> str:
    """The flags as the end of a command."""
    return "\n  " + " \\\n  ".join(flags)


def explained(plans: Sequence[Plan]) -> str:
    """Where the time of the best goes, and of the second best if there is one."""
    best = breakdown(plans[0].prediction)
    second = breakdown(plans[1].prediction) if len(plans) > 1 else {}
    title = f"{'Where the time goes, ms':42}{'best':>10}"
    if second:
        title += f"{'second':>10}{'more':>10}"
    lines = ["", title]
    differences = {name: second.get(name, 0.0) - best.get(name, 0.0) for name in (*best, *second)}
    for name, difference in differences.items():
        line = f"  {name:40}{1e3 * best.get(name, 0.0):10.1f}"
        if second:
            line += f"{1e3 * second.get(name, 0.0):10.1f}{1e3 * difference:+10.1f}"
        lines.append(line)
    if second:
        most = max(differences, key=differences.__getitem__)
        lines.append(f"The second best spends most of its difference on: {most}.")
    return "\n".join(lines)
