"""The first of 8 stages of the 2.7b model, alone on a GPU, in the order of its pipeline rank: time, memory, room.

Its neighbours are left out: what they would send is random numbers. So it computes and keeps what a rank of the
pipeline does, and never waits.
"""

import time
from bisect import bisect_left
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from common import Report, parse, seconds, start_megatron, synchronise
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from functional_tests.equality.models import Model
from megatron.seq1f1b.model import Segment, SegmentContext, attach, link_rate
from megatron.seq1f1b.partition import Task, cut_sequence
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import A100, CPU_CORE, analytic_costs, bottleneck_time
from megatron.seq1f1b.runtime.tracer import Recorder
from megatron.seq1f1b.schedule import MOVE_KINDS, Action, Kind, Placement, Shape, build, units_to_move, with_moves
from support.segments import of_lengths

STAGES = 8
# Layers of a stage, hidden size, heads, vocabulary: MODEL_SIZE=2.7b of the launch scripts.
SIZES, TINY = (4, 2560, 32, 32768), (1, 32, 2, 64)
GIB = 2**30
# Experts whose dispatcher makes the host wait for the GPU in each layer and unit.
DROPLESS = {
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


class Stage:
    """The model, and the actions of its rank on sequences of any length."""

    def __init__(
        self, sizes: tuple[int, int, int, int], device: str, longest: int, tensor: int = 1, experts: int | None = None
    ) -> None:
        """`tensor` divides heads and feed-forward block as so many tensor-parallel ranks do. Of so many `experts`, each
        an eighth of the feed-forward block, a token goes to two."""
        layers, hidden, heads, vocabulary = sizes
        self.device = torch.device(device)
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.shape = ModelShape(layers, hidden, 4 * hidden, heads, hidden // heads, vocabulary)
        sizes = {"hidden_size": hidden, "kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden // tensor}
        if experts:
            sizes |= {"num_moe_experts": experts, "moe_ffn_hidden_size": hidden // 2, **DROPLESS}
        model = Model(self.dtype, layers, heads // tensor, kv_heads=heads // tensor)
        config = model.but(**sizes, bf16=self.dtype is torch.bfloat16).transformer_config()
        layer, options = get_gpt_layer_local_spec(num_experts=experts), {"position_embedding_type": "rope"}
        self.model = GPTModel(config, layer, vocabulary, longest, post_process=False, **options).to(self.device)
        # What training keeps besides weights and their gradients: fp32 weights and Adam's two moments.
        self.optimizer = [torch.empty(3, *x.shape, device=self.device) for x in self.model.parameters()]
        self.context = SegmentContext()
        self.host_memory = self.context.host_memory
        attach([self.model], self.context)

    def run(self, segments: list[Segment], actions: list[Action]) -> None:
        """The forwards and backwards among `actions`, on sequences of these segments."""
        length = segments[-1].end
        tokens = torch.randint(self.shape.vocab_size, (1, length), device=self.device)
        positions = torch.arange(length, device=self.device)[None]
        gradient = torch.randn(length, 1, self.shape.hidden_size, device=self.device, dtype=self.dtype)
        kept = {}
        moves = {action[2:] for action in actions if action.kind is Kind.OFFLOAD}
        try:
            for action in actions:
                unit = action[2:]
                if action.kind in MOVE_KINDS:
                    move = self.host_memory.offload if action.kind is Kind.OFFLOAD else self.host_memory.reload
                    move(unit, nullcontext())
                    continue
                segment = replace(segments[action.segment], microbatch=action.microbatch)
                rows = slice(segment.start, segment.end)
                is_forward = action.kind is Kind.F
                with self.context.running(segment, True, unit, moves=is_forward and unit in moves):
                    if is_forward:
                        kept[unit] = self.model(tokens[:, rows], positions[:, rows], None)
                    else:
                        if unit in moves:
                            self.host_memory.wait(unit)
                        kept.pop(unit).backward(gradient[rows])
        finally:
            self.context.clear()

    def free(self) -> None:
        """Give back what the last run left, gradients of weights too."""
        self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def segments(self, length: int, k: int) -> list[Segment]:
        device = CPU_CORE if self.device.type == "cpu" else A100
        time = bottleneck_time(analytic_costs(self.shape, (self.shape.num_layers,), device))
        return of_lengths(cut_sequence("balanced", Task(length, k, time=time, full_speed_rows=device.full_speed_rows)))


def first_rank(num_microbatches: int, k: int) -> list[Action]:
    return list(build("1f1b", Shape(Placement(STAGES), num_microbatches, k)).ranks[0])


def time_and_memory(report: Report, stage: Stage, args, microbatches: int, most_times: float) -> None:
    """With more and more segments, which may make it at most `most_times` as slow."""
    length, microbatches = (64, 8) if args.tiny else (16384, microbatches)
    times = {}
    for k in (1, 2, 4, 8):
        run = partial(stage.run, stage.segments(length, k), first_rank(microbatches, k))
        for _ in range(2):  # the first warms up
            stage.free()
            try:
                with Recorder(stage.device, traced=True) as recorder:
                    times[k], _ = seconds(args.device, run)
            except torch.OutOfMemoryError:
                report.figure(length=length, segments=k, out_of_memory=True)
                break
        if k in times:
            report.figure(
                length=length,
                segments=k,
                seconds_per_sequence=times[k] / microbatches,
                tokens_per_second=length * microbatches / times[k],
                peak_gib=recorder.reading().peak_memory / GIB,
                reserved_gib=torch.cuda.max_memory_reserved() / GIB,
                allocator_retries=torch.cuda.memory_stats().get("num_alloc_retries", 0),  # a CPU has none
            )
    if not times:
        report.check("a stage runs", False, "out of memory with whole sequences and with 8 segments")
        return
    fewest, most = min(times), max(times)
    ratio = times[most] / times[fewest]
    report.check(
        f"{most} segments: a stage computes at most {most_times} times as long as with {fewest}",
        None if args.tiny else ratio <= most_times,
        f"{ratio:.3f} times",
    )


def host_time(report: Report, args) -> None:
    """What Python needs to issue a unit of a layer beside what the GPU needs to compute it, at the shapes of TP 8."""
    sizes, tensor = (TINY, 1) if args.tiny else ((4, 4096, 32, 32000), 8)
    lengths, k = ((16, 32), 2) if args.tiny else ((1024, 2048, 4096), 8)
    stage = Stage(sizes, args.device, max(lengths) * k, tensor)
    actions = [Action(Kind.F, 0, 0, i) for i in range(k)] + [Action(Kind.B, 0, 0, i) for i in reversed(range(k))]
    for length in lengths:
        segments = of_lengths([length] * k)
        for _ in range(2):  # the first warms up
            synchronise(args.device)
            start = time.perf_counter()
            stage.run(segments, actions)
            issued = time.perf_counter() - start
            synchronise(args.device)
            done = time.perf_counter() - start
        units = k * stage.shape.num_layers
        report.figure(
            tokens=length,
            tensor_parallel=tensor,
            host_us_per_layer_and_unit=1e6 * issued / units,
            all_us_per_layer_and_unit=1e6 * done / units,
        )
        is_judged = length == 4096 and not args.tiny
        report.check(
            f"segments of {length} tokens at TP {tensor}: the host is ahead of the GPU",
            issued < 0.9 * done if is_judged else None,
            f"it issues in {issued / done:.2f} of the time",
        )


def room(report: Report, stage: Stage, args) -> None:
    step, limit = (64, 512) if args.tiny else (4096, 524288)

    def fits(k: int, length: int) -> bool:
        stage.free()
        actions = first_rank(2 * STAGES, k)
        first_backward = next(i for i, action in enumerate(actions) if action.kind is Kind.B)
        try:  # as far as the most activations are kept
            stage.run(stage.segments(length, k), actions[: first_backward + 1])
        except torch.OutOfMemoryError:
            return False
        # A CPU swaps before it runs out of memory, so the limits of the tiny sizes are made up.
        return not args.tiny or length <= 192 * min(k, 2)

    found = {}
    for k in (1, 8):
        lengths = range(step, limit + 1, step)
        fitting = bisect_left(lengths, True, key=lambda length, k=k: not fits(k, length))
        found[k] = lengths[fitting - 1] if fitting else 0
        report.figure(segments=k, longest_sequence=found[k])
    ratio = found[8] / max(found[1], 1)
    report.check(
        "longest sequence with 8 segments at least twice that of whole ones",
        None if args.tiny else ratio >= 2,
        f"{ratio:.1f} times",
    )


def offload(report: Report, stage: Stage, args) -> None:
    """Time and peak with and without, gradients, and whether steps leave anything behind."""
    length, microbatches, k = (64, 8, 4) if args.tiny else (16384, 16, 4)
    order, segments = first_rank(microbatches, k), stage.segments(length, k)
    found = {}
    report.figure(host_gb_per_s=link_rate(torch.device(args.device), lambda: None) / 1e9)
    for share in (0.0, 0.5, 1.0):
        actions, left = with_moves(order, units_to_move(order, share)), []
        for _ in range(3):  # the first warms up, and pins the memory of the host
            stage.free()
            torch.manual_seed(1)
            with Recorder(stage.device, traced=True) as recorder:
                took, _ = seconds(args.device, partial(stage.run, segments, actions))
            left.append(torch.cuda.memory_allocated(stage.device))
        peak = recorder.reading().peak_memory
        found[share] = took, peak, [parameter.grad for parameter in stage.model.parameters()]
        host = stage.host_memory.most_bytes / GIB
        report.figure(share=share, seconds=took, peak_gib=peak / GIB, host_gib=host)
        is_judged = args.device == "cuda" and not args.tiny
        name = f"offload {share:g}: the third step leaves as much as the second"
        report.check(name, left[2] == left[1] if is_judged else None, f"{left[2] - left[1]} bytes more")
    plain, plain_peak, plain_gradients = found[0.0]
    took, peak, gradients = found[1.0]
    pairs = list(zip(gradients, plain_gradients, strict=True))
    worst = max(((ours - own).float().norm() / own.float().norm().clamp(min=1e-12)).item() for ours, own in pairs)
    report.check("offload 1: gradients are those without", worst < 1e-2, f"{worst:.1e} apart")
    report.check("offload 1: less memory", peak < plain_peak if is_judged else None, f"{peak / plain_peak:.2f} of it")
    report.check("offload 1: beside compute", took < 1.1 * plain if is_judged else None, f"{took / plain:.2f} times")


def main() -> None:
    args = parse(part="time")
    start_megatron(args.device)
    report = Report(args.output)
    if args.part == "experts":  # whose dispatcher makes the host wait for the GPU in each segment: alltoall
        stage = Stage(TINY if args.tiny else SIZES, args.device, 16384, experts=8)
        return time_and_memory(report, stage, args, microbatches=8, most_times=1.3)
    stage = Stage(TINY if args.tiny else SIZES, args.device, 524288)
    if args.part != "time":
        return {"offload": offload, "room": room}[args.part](report, stage, args)
    time_and_memory(report, stage, args, microbatches=16, most_times=1.15)
    del stage
    host_time(report, args)


if __name__ == "__main__":
    main()
