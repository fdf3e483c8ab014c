#!/usr/bin/env python3
"""What cutting a sequence costs in one process, without a pipeline: k segments against the whole, in pairs.

    python tools/benchmark_attention.py                                    # attention alone
    python tools/benchmark_attention.py --part layer --sequence-splits 4   # a whole transformer layer
    python tools/benchmark_attention.py --part latents --num-attention-heads 1   # multi-latent attention

Forward and backward of all segments, and of the uncut sequence with the same kernel, in turn: a pair gives one ratio.
The last line pools all lengths and numbers of segments; +- is the standard error. On a CPU, processor time counts.

`latents` compares segments of multi-latent attention, with the head sizes of DeepSeek-V3: those that keep latents and
project the prefix up again to those that keep keys and values. `by FLOPs` is the ratio that the rule for choosing
between them starts from, of attention to the prefix alone.
"""

from benchmarking.device import parser_of, start  # before Megatron

# isort: split
import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from math import sqrt

import torch
import torch.distributed as dist

from benchmarking.latents import latent_model, latents_kept
from benchmarking.model import build_model, use_ranks
from megatron.seq1f1b.model import Segment, SegmentContext, attach
from megatron.seq1f1b.model.attention.latents import share_of_projection
from megatron.seq1f1b.partition import even

# Prepares the inputs of the running segment; the result runs its forward.
Part = Callable[[Segment], Callable[[], torch.Tensor]]


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, num_layers=1, vocab_size=128)
    parser.add_argument("--part", choices=("attention", "layer", "latents"), default="attention")
    parser.add_argument("--seq-length", type=int, nargs="+", default=[8192, 16384], metavar="S")
    parser.add_argument("--sequence-splits", type=int, nargs="+", default=[2, 4, 8], metavar="K", help="equal segments")
    return parser.parse_args()


def segments_of(sequence_length: int, num_segments: int) -> list[Segment]:
    lengths = even(sequence_length, num_segments)
    ends = [sum(lengths[: index + 1]) for index in range(num_segments)]
    return [
        Segment(
            microbatch=0,
            index=i,
            start=end - n,
            end=end,
            sequence_length=sequence_length,
        )
        for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
    ]


def attention(layer: torch.nn.Module, args: argparse.Namespace) -> Part:
    """The attention between the projections."""
    core = layer.self_attention.core_attention
    heads = args.num_attention_heads

    def part(segment: Segment) -> Callable[[], torch.Tensor]:
        inputs = [random(segment.length, 1, heads, args.hidden_size // heads) for _ in range(3)]
        return lambda: core(*inputs)

    return part


def whole_layer(layer: torch.nn.Module, rotary: torch.nn.Module, args: argparse.Namespace) -> Part:
    """Norms, projections, attention, feed-forward."""

    def part(segment: Segment) -> Callable[[], torch.Tensor]:
        hidden = random(segment.length, 1, args.hidden_size)
        positions = rotary(segment.length)
        return lambda: layer(hidden, attention_mask=None, rotary_pos_emb=positions)[0]

    return part


def latent_attention(layer: torch.nn.Module, args: argparse.Namespace) -> Part:
    """Multi-latent attention with its projections."""

    def part(segment: Segment) -> Callable[[], torch.Tensor]:
        hidden = random(segment.length, 1, args.hidden_size)
        return lambda: layer.self_attention(hidden, attention_mask=None)[0]

    return part


def random(*shape: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.randn(shape, requires_grad=True)


def run(part: Part, context: SegmentContext, segments: list[Segment]) -> float:
    """Seconds of the forward of all segments and of the backward in reverse."""
    forwards = []
    outputs = []
    for segment in segments:
        with context.running(segment, keeps_for_backward=True):
            forwards.append(part(segment))
    began = now()
    for segment, forward in zip(segments, forwards, strict=True):
        with context.running(segment, keeps_for_backward=True):
            outputs.append(forward())
    for segment in reversed(segments):
        with context.running(segment, keeps_for_backward=True):
            output = outputs.pop()
            output.backward(torch.ones_like(output))
    seconds = now() - began
    context.assert_empty()
    return seconds


def now() -> float:
    """Seconds: this thread's processor time, or the clock once the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def main() -> None:
    args = parse()
    start()
    use_ranks(1)
    torch.set_num_threads(1)
    lengths = args.seq_length
    args.seq_length = max(args.seq_length)
    is_latent = args.part == "latents"
    model = latent_model(args) if is_latent else build_model(args, 1)
    context = SegmentContext()
    attach(model, context)
    gpt = getattr(model[0], "module", model[0])
    layer = gpt.decoder.layers[0]
    part = {
        "attention": lambda: attention(layer, args),
        "layer": lambda: whole_layer(layer, gpt.rotary_pos_emb, args),
        "latents": lambda: latent_attention(layer, args),
    }[args.part]()

    means = []
    variances = []
    names = ("keys s", "latents s") if is_latent else ("whole s", "cut s")
    by_flops = "by FLOPs" if is_latent else ""
    print(f"{'tokens':>8}{'segments':>10}{names[0]:>10}{names[1]:>10}{'ratio':>8}{'+-':>8}", by_flops)
    for length in lengths:
        for num_segments in args.sequence_splits:
            cut = segments_of(length, num_segments)
            cells = [cut, cut] if is_latent else [segments_of(length, 1), cut]
            pairs = []
            for repeat in range(args.repeats + 1):
                order = (0, 1) if repeat % 2 else (1, 0)
                seconds = {}
                for which in order:
                    with latents_kept(which == 1) if is_latent else nullcontext():
                        seconds[which] = run(part, context, cells[which])
                pairs.append((seconds[0], seconds[1]))
            firsts, seconds_ = zip(*pairs[1:], strict=True)  # the first pair warms up
            ratios = [second / first for first, second in zip(firsts, seconds_, strict=True)]
            means.append(statistics.mean(ratios))
            variances.append(statistics.variance(ratios) / len(ratios) if len(ratios) > 1 else 0.0)
            by_flops = f"{1 + share_of_projection(layer.config, cut[0].length):9.3f}" if is_latent else ""
            print(
                f"{length:8}{num_segments:10}{statistics.median(firsts):10.3f}{statistics.median(seconds_):10.3f}"
                f"{means[-1]:8.3f}{sqrt(variances[-1]):8.3f}{by_flops}",
                flush=True,
            )
    print(f"\n{args.part}, pooled: {statistics.mean(means):.3f} +- {sqrt(sum(variances)) / len(means):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
