#!/usr/bin/env python3
"""What a schedule costs the host: processor time of our own share of a unit, where its layers do nothing.

    python tools/benchmark_host.py

The middle rank of a pipeline of four, without the other ranks: messages are at hand at once. Beside it, in turn, the
same calls of Megatron's forward_step and backward_step without a schedule around them; the difference is our share:
the interpreter, the running segment, hooks, and the recorder of every training run. Below, the share of an attention
layer (choice of the kernel, cache, autograd), beside a layer that calls the same kernel and keeps nothing. A layer of
a segment has to take a GPU longer than that, or the GPU waits for the host.

The next table counts what attention makes a GPU do beside the kernel of attention: kernels that only move data, and the
bytes that they read and write, for one layer and all segments of a sequence, forward and backward. Beside it stand the
tensors that the kernel of attention itself reads and writes, each once. Latent attention has 16 heads, of 192 for
queries and keys and of 128 for values, which FlashAttention 2 and 3 take as 192; it keeps keys and values, or latents,
and then the projection up is not counted.

The last line counts what the gradient of the projection to the vocabulary costs in the backward of a unit with its loss
in pieces, beside matrix products: kernels for tensors as large as that weight, which is in 16 bits, and its gradient in
fp32.

Machines differ, and so does one machine from minute to minute, so a plain loop of additions is timed in turn, too. The
last column is our share on a core that takes 0.3 s for five million of them, as those of servers do.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from megatron.seq1f1b.platform import cpu  # noqa: E402

cpu.activate()

from megatron.core import ModelParallelConfig  # noqa: E402
from megatron.core.pipeline_parallel.schedules import backward_step, forward_step  # noqa: E402

from megatron.seq1f1b.model import Segment, SegmentContext  # noqa: E402
from megatron.seq1f1b.model.attention.latents import LatentCache  # noqa: E402
from megatron.seq1f1b.model.attention.segment_attention import SegmentAttention  # noqa: E402
from megatron.seq1f1b.model.kernels import DocumentKernel, Gradients, Kernel  # noqa: E402
from megatron.seq1f1b.model.kernels.padded import Padded  # noqa: E402
from megatron.seq1f1b.model.memory.loss_pieces import Logits  # noqa: E402
from megatron.seq1f1b.runtime.forwards.forward_segments import SegmentForwards  # noqa: E402
from megatron.seq1f1b.runtime.forwards.loss import Losses  # noqa: E402
from megatron.seq1f1b.runtime.gradients.gradient_sync import GradientSync  # noqa: E402
from megatron.seq1f1b.runtime.interpreter import Interpreter  # noqa: E402
from megatron.seq1f1b.runtime.model_calls.calls import Calls  # noqa: E402
from megatron.seq1f1b.runtime.program_contract import ProgramContract  # noqa: E402
from megatron.seq1f1b.runtime.rank_schedule import RankSchedule  # noqa: E402
from megatron.seq1f1b.runtime.recording.recorder import Recorder  # noqa: E402
from megatron.seq1f1b.runtime.step import Step  # noqa: E402
from megatron.seq1f1b.schedule import FAMILY_NAMES, Kind, Placement, Shape, build, lower_rank  # noqa: E402

RANKS = 4
RANK = 1
ADDITIONS = 500_000
USUAL_SECONDS = 0.03
CONTRACT = ProgramContract()


class Nothing(torch.nn.Module):
    """A stage whose layers do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ModelParallelConfig(pipeline_dtype=torch.float32)
        self.config.calculate_per_token_loss = False
        self.config.hidden_size = 1
        self.model_type = None

    def set_input_tensor(self, tensors: list) -> None:
        self.input = tensors[0]

    def forward(self) -> torch.Tensor:
        return self.input + 1


class Messages:
    """Stands in for the neighbours: every message is at hand at once."""

    def post_receive(self, *_) -> None:
        pass

    def receive(self, *_) -> torch.Tensor:
        return torch.zeros(1)

    def send(self, *_) -> None:
        pass

    def finish(self) -> None:
        pass


class NoKernel:
    """Attention that returns its input."""

    def forward(self, query, key, value):
        return query.view_as(query), (query,)

    def backward(self, grad_output, saved):
        return Gradients(grad_output, torch.zeros_like(saved.key), torch.zeros_like(saved.value))


def forward_step_func(_, model):
    return model(), None


def step_of(model: Nothing, num_microbatches: int, num_segments: int) -> Step:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=alone, cp=alone, pp=alone)
    step = Step(
        forward_step_func=forward_step_func,
        data_iterator=None,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=num_segments,
        micro_batch_size=1,
        pg_collection=groups,
    )
    step.placement = Placement(RANKS)
    step.rank = RANK
    step.num_sequences = [1] * num_microbatches
    step.segments = [
        [
            Segment(
                microbatch=number,
                index=index,
                start=index,
                end=index + 1,
                sequence_length=num_segments,
            )
            for index in range(num_segments)
        ]
        for number in range(num_microbatches)
    ]
    return step


def scheduled(step: Step, actions: RankSchedule) -> None:
    context = SegmentContext()
    with Calls(step, CONTRACT) as calls:
        Interpreter(
            step,
            actions,
            communicator=Messages(),
            context=context,
            forwards=SegmentForwards(
                step=step,
                context=context,
                losses=Losses(step),
                calls=calls,
                follows_segments=True,
            ),
            syncs=[GradientSync(step.chunks[0])],
            recorder=Recorder(torch.device("cpu")),
        ).run()


def bare(step: Step, actions: RankSchedule) -> None:
    """The forwards and backwards of the same actions, and nothing else."""
    model = step.chunks[0]
    kept = {}
    for action in actions.actions:
        if action.kind is Kind.F:
            input_tensor = torch.zeros(1, requires_grad=True)
            output, _ = forward_step(
                forward_step_func,
                None,
                model,
                step.num_microbatches,
                input_tensor,
                [],
                model.config,
                cp_group_size=1,
                current_microbatch=action.microbatch,
                is_last_stage=False,
            )
            kept[action.unit] = input_tensor, output
        elif action.kind.facts.gives_input_gradient:
            input_tensor, output = kept.pop(action.unit)
            backward_step(input_tensor, output, torch.zeros(1), model.config)


class Bare(torch.autograd.Function):
    """A kernel in a graph, as any attention has it."""

    @staticmethod
    def forward(ctx, query, key, value, kernel):
        output, _ = kernel.forward(query, key, value)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, grad_output, grad_output, None


def attention_layer(kernel: Kernel) -> SegmentAttention:
    config = SimpleNamespace(kv_channels=8, softmax_scale=None, attention_dropout=0.0, sequence_parallel=True)
    layer = SegmentAttention(config, kernels=SimpleNamespace(kernel=lambda *_: kernel))
    layer.segment_context = SegmentContext()
    return layer


def attend(layer: SegmentAttention, num_segments: int) -> None:
    inputs = torch.zeros(1, 1, 2, 8, requires_grad=True)
    segments = [
        Segment(
            microbatch=0,
            index=index,
            start=index,
            end=index + 1,
            sequence_length=num_segments,
        )
        for index in range(num_segments)
    ]
    outputs = []
    layer.segment_context.segment = None
    for segment in segments:
        with layer.segment_context.running(segment, True):
            outputs.append(layer(inputs, inputs, inputs))
    for segment in reversed(segments):
        with layer.segment_context.running(segment, True):
            outputs.pop().sum().backward()


def attend_bare(kernel: Kernel, num_segments: int) -> None:
    inputs = torch.zeros(1, 1, 2, 8, requires_grad=True)
    outputs = [Bare.apply(inputs, inputs, inputs, kernel) for _ in range(num_segments)]
    while outputs:
        outputs.pop().sum().backward()


class Moved(NamedTuple):
    """By the kernels beside that of attention, and by that of attention in its tensors."""

    kernels: int
    bytes: int
    by_attention: int


class CountedKernel(DocumentKernel):
    """Attention on tensors without values; in one call for packed documents, too."""

    def __init__(self, beside: "KernelsBeside") -> None:
        self._beside = beside

    def forward(self, query, key, value, documents=None):
        with self._beside.attention(query, key, value) as tensors:
            tensors += [output := query.clone(), statistics := query[..., 0].float()]
        return output, (statistics,)

    def backward(self, grad_output, saved, documents=None):
        with self._beside.attention(grad_output, *saved[:4], *saved.statistics) as tensors:
            tensors += [grads := [x.clone() for x in saved[:3]]]
        return Gradients(*grads)


_PRODUCTS = "mm", "addmm", "bmm"
_NO_KERNEL = "detach", "empty", "new_empty", "empty_like", "promote_types", *_PRODUCTS


class KernelsBeside(TorchDispatchMode):
    """Counts operators that launch a kernel, other than matrix products and those of attention; those of tensors with
    `numbers` numbers only if that is given."""

    def __init__(self, numbers: int | None = None) -> None:
        super().__init__()
        self.kernels = self.bytes = self.by_attention = 0
        self._is_attention = False
        self._numbers = numbers

    @contextmanager
    def attention(self, *read: torch.Tensor) -> Iterator[list]:
        tensors: list = list(read)
        self._is_attention = True
        yield tensors
        self._is_attention = False
        self.by_attention += _bytes(tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (self._is_attention or func.is_view or name in _NO_KERNEL):
            moved = _bytes(args if name == "copy_" else (args, result), self._numbers)
            self.kernels += moved > 0 or self._numbers is None
            self.bytes += moved
        return result


def _bytes(tensors: object, numbers: int | None = None) -> int:
    found = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in found if numbers is None or x.numel() == numbers)


def moved_by_attention(lengths: Sequence[int], documents: tuple | None = None) -> Moved:
    """In 16 bits, one sequence, 8 heads of 128 on 2 of keys and values, cut into segments of `lengths`."""
    beside = KernelsBeside()
    layer = attention_layer(CountedKernel(beside))

    def attend_to(segment: Segment) -> torch.Tensor:
        query, key, value = (empty(segment.length, 1, heads, 128) for heads in (8, 2, 2))
        with beside:
            return layer(query, key, value)

    return moved(beside, layer, attend_to, lengths, documents)


def moved_by_latent_attention(lengths: Sequence[int], keeps_latents: bool) -> Moved:
    """The same of 16 heads of 192, 64 of them rotary, and values of 128, by a kernel that takes one size of heads."""
    beside = KernelsBeside()
    heads = 16
    size = 128
    rotary_size = 64
    rank = 512
    layer = attention_layer(Padded(CountedKernel(beside), 8))
    weight = empty(heads * 2 * size, rank, requires_grad=False)

    def project_up(latent: torch.Tensor) -> tuple:
        return torch.nn.functional.linear(latent, weight), None

    def attend_to(segment: Segment) -> torch.Tensor:
        query, rotary = (empty(segment.length, 1, count, size + rotary_size) for count in (heads, 1))
        latent = empty(segment.length, 1, rank)
        if keeps_latents:
            cache = layer.segment_context.carried(
                layer, partial(LatentCache, segment.sequence_length, project_up, size)
            )
            with beside:
                projected, _ = cache.project(latent, segment)
        else:
            projected, _ = project_up(latent)
        keys, value = projected.unflatten(2, (heads, -1)).split(size, -1)
        key = torch.cat([keys, rotary[..., size:].expand(-1, -1, heads, -1)], -1)
        with beside:
            return layer(query, key, value)

    return moved(beside, layer, attend_to, lengths)


def empty(*shape: int, requires_grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=requires_grad)


def moved(
    beside: KernelsBeside,
    layer: SegmentAttention,
    attend_to: Callable[[Segment], torch.Tensor],
    lengths: Sequence[int],
    documents: tuple | None = None,
) -> Moved:
    """What `beside` counts while all segments go forward, then backward."""
    units = []
    ends = list(accumulate(lengths))
    layer.segment_context.segment = None
    for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        segment = Segment(
            microbatch=0,
            index=i,
            start=end - length,
            end=end,
            sequence_length=ends[-1],
            documents=documents,
        )
        with layer.segment_context.running(segment, True):
            units.append((segment, attend_to(segment)))
    for segment, output in reversed(units):
        grad = torch.empty_like(output)
        with layer.segment_context.running(segment, True), beside:
            output.backward(grad)
    return Moved(beside.kernels, beside.bytes, beside.by_attention)


def moved_by_weight_of_loss(tokens: int, pieces: int, words: int = 32768, hidden_size: int = 4096) -> Moved:
    """In the backward of a unit, by the gradient of the projection from hidden states to logits."""
    weight = torch.nn.Parameter(empty(words, hidden_size))
    weight.main_grad = torch.empty_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    weight.register_post_accumulate_grad_hook(add_as_ddp_does)
    hidden = empty(tokens, 1, hidden_size)
    labels = torch.empty((1, tokens), dtype=torch.int64, device="meta")
    shape = torch.Size((tokens, 1, words))
    logits = Logits(
        compute=torch.nn.functional.linear,
        layer=None,
        hidden=hidden,
        weight=weight,
        num_runs=1,
        length=tokens // pieces,
        shape=shape,
    )
    losses = logits.loss(labels, lambda labels, logits: logits.float().logsumexp(-1).t())
    with KernelsBeside(weight.numel()) as beside:
        losses.sum().backward()
    return Moved(beside.kernels, beside.bytes, 0)


def add_as_ddp_does(weight: torch.nn.Parameter) -> None:
    """Megatron's hook of a parameter."""
    if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
        weight.main_grad.add_(weight.grad)
    weight.grad = None


class Share(NamedTuple):
    """Microseconds a unit, in each repeat: our share, the bare calls, our share on the usual core."""

    own: list[float]
    bare: list[float]
    usual: list[float]


def share(ours: Callable[[], None], bare: Callable[[], None], units: int, repeats: int) -> Share:
    rounds = [(seconds(ours), seconds(bare), seconds(add_up)) for _ in range(repeats + 1)][1:]  # the first warms up
    own = [1e6 * (a - b) / units for a, b, _ in rounds]
    usual = [one * USUAL_SECONDS / loop for one, (*_, loop) in zip(own, rounds, strict=True)]
    return Share(own, [1e6 * b / units for _, b, _ in rounds], usual)


def seconds(work: Callable[[], None]) -> float:
    """Processor time, which other processes of the machine lengthen less than wall time."""
    start = time.process_time()
    work()
    return time.process_time() - start


def add_up() -> None:
    total = 0
    for number in range(ADDITIONS):
        total += number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--sequence-splits", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def show_moved(name: str, found: Moved) -> None:
        print(f"{name:36}{found.kernels:10}{found.bytes / 1e6:8.0f}{found.by_attention / 1e6:18.0f}", flush=True)

    def show(name: str, found: Share) -> None:
        values = statistics.median(found.own), min(found.own), statistics.median(found.bare)
        values += (statistics.median(found.usual),)
        print(f"{name:24}{''.join(f'{value:12.1f}' for value in values)}", flush=True)

    print(f"{'microseconds a unit':24}{'our share':>12}{'least':>12}{'bare calls':>12}{'usual core':>12}")
    shape = Shape(Placement(RANKS), args.microbatches, args.sequence_splits)
    step = step_of(Nothing(), args.microbatches, args.sequence_splits)
    for family in FAMILY_NAMES:
        actions = RankSchedule(lower_rank(build(family, shape), RANK))
        ours = partial(scheduled, step, actions)
        bare_calls = partial(bare, step, actions)
        show(family, share(ours, bare_calls, shape.num_units, args.repeats))
    kernel = NoKernel()
    layer = attention_layer(NoKernel())
    units = 8 * args.sequence_splits
    ours = partial(attend, layer, units)
    bare_calls = partial(attend_bare, kernel, units)
    show("an attention layer", share(ours, bare_calls, units, args.repeats))

    print(f"\n{'32,768 tokens, 16 bits':36}{'kernels':>10}{'MB':>8}{'MB of attention':>18}")
    for num_segments in (1, 2, 4, 8, 16):
        for name, documents in (("", None), (", 8 documents", (tuple(range(0, 32768, 4096)),))):
            found = moved_by_attention([32768 // num_segments] * num_segments, documents)
            show_moved(f"{num_segments} segments{name}", found)
        for name, keeps_latents in (("values of 128 for 192", False), ("latents", True)):
            found = moved_by_latent_attention([32768 // num_segments] * num_segments, keeps_latents)
            show_moved(f"{num_segments} segments, {name}", found)
    print(f"\n{'a weight of 32,768 x 4,096':36}{'kernels':>10}{'MB':>8}")
    for pieces in (1, 4):
        found = moved_by_weight_of_loss(2048 * pieces, pieces)
        print(f"{f'{2048 * pieces:,} tokens in {pieces} pieces':36}{found.kernels:10}{found.bytes / 1e6:8.0f}")


if __name__ == "__main__":
    main()
