"""TFLOPS of attention by segments, forward and backward, beside kernels that Megatron would use on whole sequences."""

from collections.abc import Callable
from importlib.util import find_spec
from statistics import median

import torch
from common import Report, parse, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.seq1f1b.model.kernels import KernelChoice
from support.segments import Attended, attention, of_lengths

SIZE = 128
# Query heads and KV heads of a whole model, and of one rank of TP 8.
HEADS = ((32, 8), (4, 1))


def by_segments(layer, length: int, segment: int, tensors: list[torch.Tensor], device: str) -> tuple[float, float]:
    """Seconds of the forwards and of the backwards of all segments."""
    attended = Attended(layer, tensors[:3], tensors[3], of_lengths([segment] * (length // segment)))
    forward, _ = seconds(device, attended.forward)
    backward, _ = seconds(device, attended.backward)
    return forward, backward


def of_the_whole(attention: Callable, tensors: list[torch.Tensor], device: str) -> tuple[float, float]:
    """Seconds of a forward and a backward of `attention(query, key, value)`, in Megatron's shapes."""
    *inputs, grad = (tensor.detach() for tensor in tensors)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    forward, output = seconds(device, lambda: attention(*inputs))
    backward, _ = seconds(device, lambda: output.backward(grad.view_as(output)))
    return forward, backward


def cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[s, b, h, d] to [s, b, h, d]; heads are expanded, since it takes no groups."""
    repeats = query.shape[2] // key.shape[2]
    heads = [x.permute(1, 2, 0, 3) for x in (query, *(y.repeat_interleave(repeats, 2) for y in (key, value)))]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)


def baselines(heads: int, groups: int, size: int, device: str) -> dict[str, Callable]:
    """Attention of whole sequences by what a user has without this package."""
    if device == "cpu":
        return {}
    found: dict[str, Callable] = {"cuDNN": cudnn}
    if find_spec("transformer_engine_torch") is not None:
        from transformer_engine.pytorch import DotProductAttention

        found["Transformer Engine"] = DotProductAttention(
            heads, size, num_gqa_groups=groups, attn_mask_type="causal", attention_dropout=0.0
        )
    return found


def compare(report: Report, args, length: int, heads: int, groups: int) -> None:
    size = 32 if args.tiny else SIZE
    parts = (length // 8, length // 4, length) if args.tiny else (512, 2048, 4096, 8192, 16384, length)
    shapes = [(length, 1, heads, size), *[(length, 1, groups, size)] * 2, (length, 1, heads * size)]
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    tensors = [torch.randn(shape, device=args.device, dtype=dtype) for shape in shapes]
    layer = attention(size, kernels=KernelChoice())
    passes = {str(part): lambda part=part: by_segments(layer, length, part, tensors, args.device) for part in parts}
    for name, whole in baselines(heads, groups, size, args.device).items():
        passes[name] = lambda whole=whole: of_the_whole(whole, tensors, args.device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for _ in range(1 + args.repeats):  # the first warms up
        for name in list(times):  # in turn, so that a clock that changes changes for all
            try:
                times[name].append(passes[name]())
            except (RuntimeError, AssertionError) as error:  # a kernel that does not take this shape
                report.figure(length=length, heads=heads, attention=name, unavailable=str(error).splitlines()[0])
                del times[name]
    flops = 4 * heads * size * length * (length + 1) / 2  # of the two products of the forward; causal
    medians = {name: [median(x) for x in zip(*found[1:], strict=True)] for name, found in times.items()}
    wholes = [name for name in medians if name == str(length) or not name.isdigit()]
    best = min(wholes, key=lambda name: sum(medians[name]))
    for name, (forward, backward) in medians.items():
        total = forward + backward
        report.figure(
            length=length,
            heads=heads,
            attention=f"segments of {name}" if name.isdigit() else f"{name}, whole",
            forward_tflops=flops / forward / 1e12,
            backward_tflops=2.5 * flops / backward / 1e12,
            against_its_own_whole=sum(medians[str(length)]) / total,
            against_the_best_whole=sum(medians[best]) / total,
        )
    of_interest = str(length // 8 if args.tiny else 8192)
    own, others = (sum(medians[name]) / sum(medians[of_interest]) for name in (str(length), best))
    what = f"{heads} heads, segments of {of_interest} in {length} tokens"
    judged = not args.tiny and heads == HEADS[0][0]
    report.check(f"{what}: at least 0.97 of its speed on the whole", own >= 0.97 if judged else None, f"{own:.3f}")
    report.check(f"{what}: at least 0.9 of the best ({best})", others >= 0.9 if judged else None, f"{others:.3f}")


def main() -> None:
    args = parse(repeats=3)
    report = Report(args.output)
    for length in (256, 512) if args.tiny else (32768, 131072):
        for heads, groups in ((4, 2),) if args.tiny else HEADS:
            compare(report, args, length, heads, groups)


if __name__ == "__main__":
    main()
