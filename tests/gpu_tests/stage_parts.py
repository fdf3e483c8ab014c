"""What one stage of the 2.7b model takes: time and memory over the number of segments, what the host needs,
activations on the host, the loss in pieces, the longest sequence, experts. In one process, most important first."""

from gpu_tests.common import GIB, Report, parser, seconds, start_megatron, synchronise  # before Megatron

# isort: split
import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from gpu_tests import loss
from gpu_tests.stage import OF_2_7B, STAGES, TINY, Sizes, Stage, first_rank
from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.model import HostMemory, Segment, link_rate
from megatron.seq1f1b.runtime.recording.recorder import Recorder
from megatron.seq1f1b.schedule import Action, Kind, Placement, units_to_move, with_moves
from support.segments import of_lengths

SPLITS = (1, 2, 4, 8, 16)
# Tokens of a sequence, with micro-batches of a step.
STEPS, TINY_STEPS = {16384: 16, 32768: 8}, {64: 2}
# Times as long as with the fewest segments that a stage may take: judged at 8 segments of 2,048 tokens and more.
MOST_TIMES, MOST_SEGMENTS_JUDGED = 1.15, 8
MOST_TIMES_OF_EXPERTS = 1.3
# Times as long as with Megatron's own layers that the host may need.
MOST_TIMES_OF_HOST = 1.1


class StepTaken(NamedTuple):
    """The second of two runs of one step: seconds, those after which the host had issued all, bytes above those before
    it, and bytes held back by the allocator."""

    seconds: float
    issued: float
    peak: float
    reserved: int
    retries: int


def step_of(stage: Stage, args: argparse.Namespace, length: int, k: int, microbatches: int) -> StepTaken | None:
    """None if the memory does not suffice."""
    segments, actions = stage.segments(length, k), first_rank(microbatches, k)
    stage.free()
    try:
        for _ in range(2):  # the first warms up
            stage.model.zero_grad()
            with Recorder(stage.device, traced=True) as recorder:
                issued, took = issued_and_done(stage, segments, actions)
    except torch.OutOfMemoryError:
        return None
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)  # a CPU has none
    return StepTaken(took, issued, recorder.reading().peak_memory, torch.cuda.max_memory_reserved(), retries)


def issued_and_done(stage: Stage, segments: list[Segment], actions: list[Action]) -> tuple[float, float]:
    """Seconds until the host has issued `actions`, and until the device has computed them."""
    synchronise(stage.device.type)
    start = time.perf_counter()
    stage.run(segments, actions)
    issued = time.perf_counter() - start
    synchronise(stage.device.type)
    return issued, time.perf_counter() - start


def time_and_memory(report: Report, args: argparse.Namespace, stage: Stage) -> None:
    """With more and more segments, beside what the planner predicts."""
    machine = nearest_machine(args.device)
    for length, microbatches in (TINY_STEPS if args.tiny else STEPS).items():
        taken = {}
        for k in SPLITS:
            found = step_of(stage, args, length, k, microbatches)
            if found is None:
                report.figure("stage", length=length, segments=k, out_of_memory=True)
                continue
            taken[k] = found.seconds
            report.figure(
                "stage",
                length=length,
                segments=k,
                seconds_per_sequence=found.seconds / microbatches,
                issued_share=found.issued / found.seconds,
                tokens_per_second=length * microbatches / found.seconds,
                peak_gib=found.peak / GIB,
                reserved_gib=found.reserved / GIB,
                allocator_retries=found.retries,
            )
            predicted = prediction(stage, machine, length, k, microbatches)
            report.figure(
                "prediction",
                machine=machine.name,
                length=length,
                segments=k,
                seconds_per_sequence=found.seconds / microbatches,
                predicted_seconds=predicted.seconds / microbatches,
                peak_gib=found.peak / GIB,
                predicted_gib=predicted.peak / GIB,
            )
        if not taken:
            report.check(f"a stage runs with {length} tokens", False, f"out of memory with {SPLITS} segments")
            continue
        fewest = min(taken)
        most = max(k for k in taken if k <= max(MOST_SEGMENTS_JUDGED, fewest))
        ratio = taken[most] / taken[fewest]
        report.check(
            f"{length} tokens in {most} segments: a stage computes at most {MOST_TIMES} times as long as in {fewest}",
            None if args.tiny else ratio <= MOST_TIMES,
            f"{ratio:.3f} times",
        )


class Predicted(NamedTuple):
    """Of the first rank of a step: seconds in compute, and bytes above those between steps."""

    seconds: float
    peak: float


MACHINES = {"A100": "a100-80gb", "H200": "h200-141gb", "H20": "h20-96gb", "L40S": "l40s-48gb"}


def nearest_machine(device: str) -> Machine:
    """The machine file of the GPU at hand; that of an H100 for one without."""
    if device == "cpu":
        return read_machine("cpu")
    card = torch.cuda.get_device_name()
    return read_machine(next((machine for name, machine in MACHINES.items() if name in card), "h100-80gb"))


def prediction(stage: Stage, machine: Machine, length: int, k: int, microbatches: int) -> Predicted:
    """By the planner's costs, of the step that `step_of` takes."""
    of_stage = stage.shape
    whole = ModelShape(
        STAGES * of_stage.num_layers,
        of_stage.hidden_size,
        of_stage.ffn_hidden_size,
        of_stage.num_heads,
        of_stage.head_dim,
        of_stage.vocab_size,
    )
    setup = TrainingSetup(
        whole,
        length,
        num_microbatches=microbatches,
        placement=Placement(STAGES),
        segments=tuple(segment.length for segment in stage.segments(length, k)),
    )
    found = predict(setup, machine)
    memory = found.memory[0]
    between_steps = memory.weights + memory.gradients + memory.optimizer
    # Here, gradients are new in each step, and in the type of the weights.
    peak = memory.total - between_steps - memory.reserved + stage.gradient_bytes
    return Predicted(found.busy[0], peak)


def host_time(report: Report, args: argparse.Namespace) -> None:
    """What Python needs to issue a unit of a layer beside what the GPU needs to compute it, at the shapes of TP 8, and
    beside what Megatron's own layers need for as many tokens in sequences of their own."""
    sizes = TINY if args.tiny else Sizes(layers=4, hidden=4096, heads=32, vocabulary=32000, tensor=8)
    lengths, k = ((16, 32), 2) if args.tiny else ((512, 1024, 2048, 4096), 8)
    ours = Stage(sizes, args.device, max(lengths) * k)
    own = Stage(sizes, args.device, max(lengths), by_segments=False)
    of_segments = [Action(Kind.F, 0, 0, i) for i in range(k)] + [Action(Kind.B, 0, 0, i) for i in reversed(range(k))]
    of_sequences = [Action(kind, 0, i, 0) for i in range(k) for kind in (Kind.F, Kind.B)]
    units = k * sizes.layers
    for length in lengths:
        issued, done = shortest(ours, of_lengths([length] * k), of_segments)
        of_own, _ = shortest(own, of_lengths([length]), of_sequences)
        report.figure(
            "host",
            tokens=length,
            tensor_parallel=sizes.tensor,
            host_us_per_layer_and_unit=1e6 * issued / units,
            own_us_per_layer_and_unit=1e6 * of_own / units,
            all_us_per_layer_and_unit=1e6 * done / units,
        )
        is_judged = length == 4096 and not args.tiny
        report.check(
            f"segments of {length} tokens at TP {sizes.tensor}: the host is ahead of the GPU",
            issued < 0.9 * done if is_judged else None,
            f"it issues in {issued / done:.2f} of the time",
        )
        is_judged = length == min(lengths) and not args.tiny  # where Megatron's layers, too, wait for the host alone
        report.check(
            f"segments of {length} tokens at TP {sizes.tensor}: the host needs at most {MOST_TIMES_OF_HOST} times as "
            "long as for Megatron's own layers",
            issued <= MOST_TIMES_OF_HOST * of_own if is_judged else None,
            f"{issued / of_own:.2f} times",
        )


def shortest(stage: Stage, segments: list[Segment], actions: list[Action]) -> tuple[float, float]:
    """`issued_and_done` of the run, of a few, that the host issued soonest."""
    issued_and_done(stage, segments, actions)  # warms up
    return min(issued_and_done(stage, segments, actions) for _ in range(3))


class Offloaded(NamedTuple):
    """A step with a share of its activations on the host."""

    name: str
    seconds: float
    peak: float
    moved: int  # bytes to the host, and as many back
    gradients: list[torch.Tensor]


def offload(report: Report, args: argparse.Namespace, stage: Stage) -> None:
    """Time and peak with and without, gradients, and whether steps leave anything behind."""
    length, microbatches, k = (64, 2, 4) if args.tiny else (16384, 16, 4)
    order, segments = first_rank(microbatches, k), stage.segments(length, k)
    found: list[Offloaded] = []
    rate = link_rate(torch.device(args.device), lambda: None)
    is_judged = args.device == "cuda" and not args.tiny
    for share, layers_leaving in ((0.0, 0), (0.5, 0), (1.0, 0), (1.0, 2)):
        by_layer = layers_leaving > 0
        name = f"offload {share:g}"
        if by_layer:
            name += " by layer"
        stage.move(HostMemory(layers_leaving))
        actions, left = with_moves(order, units_to_move(order, share, by_layer=by_layer), by_layer=by_layer), []
        for _ in range(3):  # the first warms up, and pins the memory of the host
            stage.free()
            torch.manual_seed(1)
            with Recorder(stage.device, traced=True) as recorder:
                took, _ = seconds(args.device, partial(stage.run, segments, actions))
            left.append(torch.cuda.memory_allocated(stage.device))
        peak, moved = recorder.reading().peak_memory, stage.moved_bytes
        gradients = [parameter.grad for parameter in stage.model.parameters()]
        found.append(Offloaded(name, took, peak, moved, gradients))
        plain = found[0].seconds
        copying = moved / rate  # beside one another, there and back
        report.figure(
            "offload",
            length=length,
            segments=k,
            share=share,
            layers_leaving=layers_leaving,
            seconds_per_sequence=took / microbatches,
            peak_gib=peak / GIB,
            host_gib=stage.host_memory.most_bytes / GIB,
            moved_gib=moved / GIB,
            link_gb_per_s=rate / 1e9,
            hidden_share=max(0.0, 1 - max(0.0, took - plain) / copying) if moved else None,
        )
        leaves_as_much = left[2] == left[1] if is_judged else None
        report.check(
            f"{name}: the third step leaves as much as the second", leaves_as_much, f"{left[2] - left[1]} bytes more"
        )
    stage.move(HostMemory())
    plain, _, all_moved, by_layer = found
    for moved in (all_moved, by_layer):
        pairs = zip(moved.gradients, plain.gradients, strict=True)
        worst = max(((ours - own).float().norm() / own.float().norm().clamp(min=1e-12)).item() for ours, own in pairs)
        report.check(f"{moved.name}: gradients are those without", worst < 1e-2, f"{worst:.1e} apart")
    for moved, other in ((all_moved, plain), (by_layer, all_moved)):
        less = moved.peak < other.peak if is_judged else None
        report.check(f"{moved.name}: less memory", less, f"{moved.peak / other.peak:.2f} of {other.name}")
    # A link too slow to be hidden is no fault of the schedule: the copies are then the step.
    bound = max(plain.seconds, all_moved.moved / rate)
    report.check(
        "offload 1: beside compute, or as fast as the link",
        all_moved.seconds < 1.1 * bound if is_judged else None,
        f"{all_moved.seconds / bound:.2f} times the longer of compute ({plain.seconds:.2f} s) and copies "
        f"({all_moved.moved / rate:.2f} s at {rate / 1e9:.0f} GB/s each way)",
    )


def longest_sequence(report: Report, args: argparse.Namespace, stage: Stage) -> None:
    """For each number of segments the longest sequence that fits, as a multiple of `step` tokens."""
    step = 64 if args.tiny else 4096
    found = {}
    for k in (1, 4, 8, 16):
        fits = partial(sequence_fits, args, stage, k)
        found[k] = longest(fits, first_guess(args, stage, k, step), step)
        report.figure("longest", segments=k, longest_sequence=found[k])
    ratio = found[8] / max(found[1], 1)
    report.check(
        "longest sequence with 8 segments at least twice that of whole ones",
        None if args.tiny else ratio >= 2,
        f"{ratio:.1f} times",
    )


def to_the_fullest_moment(k: int) -> list[Action]:
    """As far as the most activations are kept: to the end of the first backward."""
    actions = first_rank(2 * STAGES, k)
    first_backward = next(i for i, action in enumerate(actions) if action.kind is Kind.B)
    return actions[: first_backward + 1]


def sequence_fits(args: argparse.Namespace, stage: Stage, k: int, length: int) -> bool:
    stage.free()
    try:
        stage.run(stage.segments(length, k), to_the_fullest_moment(k))
    except torch.OutOfMemoryError:
        return False
    # A CPU swaps before it runs out of memory, so the limits of the tiny sizes are made up.
    return not args.tiny or length <= 192 * min(k, 2)


def first_guess(args: argparse.Namespace, stage: Stage, k: int, step: int) -> int:
    """A length by the memory of two short sequences: it grows in proportion to their length."""
    if args.tiny:
        return 3 * step
    peaks = []
    for length in (2 * step, 4 * step):
        stage.free()
        with Recorder(stage.device, traced=True) as recorder:
            stage.run(stage.segments(length, k), to_the_fullest_moment(k))
        peaks.append(recorder.reading().peak_memory)
    stage.free()
    per_token = (peaks[1] - peaks[0]) / (2 * step)
    free, _ = torch.cuda.mem_get_info(stage.device)
    beside = peaks[0] - 2 * step * per_token
    return int((free - beside) / per_token)


def longest(fits: Callable[[int], bool], guess: int, step: int) -> int:
    """The largest multiple of `step` that fits, searched from a `guess` near it; 0 if none does."""
    length = max(1, guess // step) * step
    if fits(length):
        while fits(length + step):
            length += step
        return length
    while length > 0:
        length -= step
        if length and fits(length):
            return length
    return 0


def experts(report: Report, args: argparse.Namespace) -> None:
    """A stage with experts, each of whose dispatchers makes the host wait for the GPU in each segment. As many whole
    sequences of a segment's length tell what shorter calls cost anyway."""
    sizes = (TINY if args.tiny else OF_2_7B)._replace(experts=8)
    length, microbatches = (64, 2) if args.tiny else (16384, 8)
    stage = Stage(sizes, args.device, length)
    taken = {}
    for k in (1, 2, 4, 8):
        found = step_of(stage, args, length, k, microbatches)
        if found is None:
            continue
        taken[k] = found.seconds
        as_sequences = step_of(stage, args, length // k, 1, microbatches * k) if k > 1 else found
        report.figure(
            "experts",
            length=length,
            segments=k,
            seconds_per_sequence=found.seconds / microbatches,
            seconds_as_sequences=as_sequences.seconds / microbatches if as_sequences else None,
        )
    if not taken:
        report.check("a stage with experts runs", False, "out of memory")
        return
    ratio = taken[max(taken)] / taken[min(taken)]
    report.check(
        f"{max(taken)} segments: a stage with experts computes at most {MOST_TIMES_OF_EXPERTS} times as long as with "
        f"{min(taken)}",
        None if args.tiny else ratio <= MOST_TIMES_OF_EXPERTS,
        f"{ratio:.3f} times",
    )


def main() -> None:
    args = parser(__doc__).parse_args()
    start_megatron(args.device)
    report = Report(args.output)
    stage = Stage(TINY if args.tiny else OF_2_7B, args.device, 524288)
    with report.attempt("time and memory of a stage"):
        time_and_memory(report, args, stage)
    with report.attempt("what the host needs"):
        host_time(report, args)
    with report.attempt("activations on the host"):
        offload(report, args, stage)
    stage.free()
    with report.attempt("the loss in pieces"):
        loss.whole_and_in_pieces(report, args)
    with report.attempt("longest sequence"):
        longest_sequence(report, args, stage)
    del stage
    with report.attempt("experts"):
        experts(report, args)


if __name__ == "__main__":
    main()
