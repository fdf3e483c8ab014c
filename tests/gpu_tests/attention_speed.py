"""TFLOPS of attention by segments, forward and backward, beside kernels that Megatron would use on whole sequences."""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_tests.common import Report, dtype_of, parser, seconds
from megatron.seq1f1b.model.kernels import KernelChoice
from support.segments import Attended, attention, of_lengths

SPLITS = (1, 4, 8, 16)
LENGTHS = (8192, 32768, 131072)
JUDGED = 8192  # tokens of a segment, in sequences of several
# Of the same kernel's speed on the whole: a backward expands the keys and values that heads share, and adds the
# gradients of the prefix to sums in fp32.
GOAL = 0.93


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.size} on {self.kv_heads}"


# Of a whole model, and of one rank of TP 8, whose short segments fill few multiprocessors.
SHAPES = (Shape(32, 8, 128), Shape(32, 8, 64), Shape(4, 1, 128))
TINY = (Shape(4, 2, 32),)


class Times(NamedTuple):
    """Seconds of the forwards and of the backwards."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def by_segments(layer: torch.nn.Module, length: int, k: int, tensors: list[torch.Tensor], device: str) -> Times:
    """Of all segments."""
    attended = Attended(layer, tensors[:3], tensors[3], of_lengths([length // k] * k))
    forward, _ = seconds(device, attended.forward)
    backward, _ = seconds(device, attended.backward)
    return Times(forward, backward)


def of_the_whole(attend: Callable, tensors: list[torch.Tensor], device: str) -> Times:
    """Of `attend(query, key, value)`, in Megatron's shapes."""
    *inputs, grad = (tensor.detach() for tensor in tensors)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    forward, output = seconds(device, lambda: attend(*inputs))
    backward, _ = seconds(device, lambda: output.backward(grad.view_as(output)))
    return Times(forward, backward)


def cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[s, b, h, d] to [s, b, h, d]; heads are expanded, since it takes no groups."""
    repeats = query.shape[2] // key.shape[2]
    heads = [x.permute(1, 2, 0, 3) for x in (query, *(y.repeat_interleave(repeats, 2) for y in (key, value)))]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)


def baselines(shape: Shape, device: str) -> dict[str, Callable]:
    """Attention of whole sequences by what a user has without this package."""
    if device == "cpu":
        return {}
    found: dict[str, Callable] = {"cuDNN": cudnn}
    if find_spec("transformer_engine_torch") is not None:
        from transformer_engine.pytorch import DotProductAttention

        found["Transformer Engine"] = DotProductAttention(
            shape.heads,
            shape.size,
            num_gqa_groups=shape.kv_heads,
            attn_mask_type="causal",
            attention_dropout=0.0,
        )
    return found


def compare(report: Report, args: argparse.Namespace, length: int, shape: Shape) -> None:
    options = {"device": args.device, "dtype": dtype_of(args.device)}
    query = torch.randn(length, 1, shape.heads, shape.size, **options)
    key, value = torch.randn(2, length, 1, shape.kv_heads, shape.size, **options)
    tensors = [query, key, value, torch.randn(length, 1, shape.heads * shape.size, **options)]
    layer = attention(shape.size, kernels=KernelChoice())
    passes: dict[int | str, Callable[[], Times]] = {}
    for k in SPLITS:
        passes[k] = lambda k=k: by_segments(layer, length, k, tensors, args.device)
    for name, whole in baselines(shape, args.device).items():
        passes[name] = lambda whole=whole: of_the_whole(whole, tensors, args.device)
    times: dict[int | str, list[Times]] = {name: [] for name in passes}
    for _ in range(1 + args.repeats):  # the first warms up
        for name in list(times):  # in turn, so that a clock that changes changes for all
            try:
                times[name].append(passes[name]())
            except (RuntimeError, AssertionError) as error:  # a kernel that does not take this shape
                report.figure("attention unavailable", length=length, attention=name, why=str(error).splitlines()[0])
                del times[name]
    flops = 4 * shape.heads * shape.size * length * (length + 1) / 2  # of the two products of the forward; causal
    medians = {
        name: Times(median(each.forward for each in found[1:]), median(each.backward for each in found[1:]))
        for name, found in times.items()
    }
    own = medians[1].total
    for name, time in medians.items():
        report.figure(
            "attention speed",
            length=length,
            heads=str(shape),
            segments=name if isinstance(name, int) else None,
            kernel="ours" if isinstance(name, int) else name,
            forward_tflops=flops / time.forward / 1e12,
            backward_tflops=2.5 * flops / time.backward / 1e12,
            tflops=3.5 * flops / time.total / 1e12,
            of_own_whole=own / time.total,
        )
    best = min((name for name in medians if name == 1 or isinstance(name, str)), key=lambda name: medians[name].total)
    for k in SPLITS[1:]:
        is_judged = not args.tiny and shape == SHAPES[0] and length // k == JUDGED
        if is_judged or k == SPLITS[-1]:
            share = own / medians[k].total
            best_words = "" if best == 1 else f", {medians[best].total / medians[k].total:.3f} of {best} on the whole"
            report.check(
                f"{length} tokens in {k} segments, {shape}: at least {GOAL} of its speed on the whole",
                share >= GOAL if is_judged else None,
                f"{share:.3f}{best_words}",
            )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--repeats", type=int, default=3)
    args = flags.parse_args()
    report = Report(args.output)
    for length in (256, 512) if args.tiny else LENGTHS:
        for shape in TINY if args.tiny else SHAPES:
            with report.attempt(f"{length} tokens, {shape}"):
                compare(report, args, length, shape)


if __name__ == "__main__":
    main()
