"""TFLOPS of attention by segments, forward and backward, beside the same kernel on whole sequences."""

from statistics import median

import torch
from common import Attended, Report, attention_layer, parse, seconds

from megatron.seq1f1b.model.kernels import KernelChoice

HEADS, GROUPS, SIZE = 32, 8, 128


def pass_over(layer, length: int, segment: int, tensors: list[torch.Tensor], device: str) -> tuple[float, float]:
    """Seconds of the forwards and of the backwards of all segments."""
    attended = Attended(layer, [segment] * (length // segment), *tensors)
    forward, _ = seconds(device, attended.forward)
    backward, _ = seconds(device, attended.backward)
    return forward, backward


def main() -> None:
    args = parse(repeats=3)
    report = Report(args.output)
    heads, groups, size = (4, 2, 32) if args.tiny else (HEADS, GROUPS, SIZE)
    for length in (256, 512) if args.tiny else (32768, 131072):
        segments = [length // 8, length // 4, length] if args.tiny else [2048, 4096, 8192, 16384, length]
        shapes = [(length, 1, heads, size), *[(length, 1, groups, size)] * 2, (length, 1, heads * size)]
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        tensors = [torch.randn(shape, device=args.device, dtype=dtype) for shape in shapes]
        layer = attention_layer(KernelChoice(), size)
        times: dict[int, list[tuple[float, float]]] = {segment: [] for segment in segments}
        # In turn, so that a clock that changes changes for all; the first round warms up.
        for _ in range(1 + args.repeats):
            for segment in segments:
                times[segment].append(pass_over(layer, length, segment, tensors, args.device))
        flops = 4 * heads * size * length * (length + 1) / 2  # of the two products of the forward; causal
        medians = {segment: [median(x) for x in zip(*times[segment][1:], strict=True)] for segment in segments}
        for segment, (forward, backward) in medians.items():
            speed = sum(medians[length]) / (forward + backward)
            report.figure(
                length=length,
                segment=segment,
                forward_tflops=flops / forward / 1e12,
                backward_tflops=2.5 * flops / backward / 1e12,
                against_whole=speed,
            )
            if segment == (length // 8 if args.tiny else 8192):
                report.check(
                    f"segments of {segment} in {length} tokens: speed at least 0.97 of the whole",
                    None if args.tiny else speed >= 0.97,
                    f"{speed:.3f}",
                )


if __name__ == "__main__":
    main()
