"""Attention by segments in bf16 against fp64, beside the errors of the same kernel on whole sequences."""

from importlib import import_module
from math import sqrt
from typing import NamedTuple

import torch

from gpu_tests.common import Report, parser
from megatron.seq1f1b.model.kernels import KernelChoice
from support.segments import attention, inputs, of_lengths, run


class Case(NamedTuple):
    """Shapes of attention; the head size is that of queries and keys, `value_size` that of values."""

    name: str
    sequences: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    window_share: float | None = None  # of the sequence
    has_sink: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sequences, self.heads, self.kv_heads, self.size, self.value_size


CASES = (
    Case("heads of 64", 2, 8, 8, 64, 64),
    Case("heads of 80", 1, 8, 8, 80, 80),
    Case("heads of 96", 1, 8, 8, 96, 96),
    Case("heads of 128, 4 to a KV head", 2, 16, 4, 128, 128),
    Case("heads of 256", 1, 4, 4, 256, 256),
    Case("latent attention, 192 and 128", 1, 8, 8, 192, 128),
    Case("heads of 100", 1, 4, 4, 100, 100),
    Case("a window of a quarter", 1, 8, 2, 64, 64, window_share=0.25),
    Case("a window shorter than segments", 1, 8, 2, 128, 128, window_share=0.05),
    Case("a sink", 2, 8, 2, 64, 64, has_sink=True),
    Case("a sink and a window", 1, 8, 8, 128, 128, window_share=0.25, has_sink=True),
)
PARTS = ("output", "dQ", "dK", "dV", "dSink")
PACKAGES = {None: "PyTorch", 4: "flash-attn-4"}


def random(case: Case, length: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [x.to(device) for x in inputs(length, case.shape, torch.bfloat16)]


def attend(
    case: Case, kernels: KernelChoice, lengths: list[int], tensors: list[torch.Tensor], documents: tuple | None = None
) -> list[torch.Tensor]:
    """Output and gradients; of the sink, too, if there is one."""
    query, key, value, grad = tensors
    options = {}
    if case.window_share is not None:
        options["window"] = int(case.window_share * sum(lengths))
    if case.has_sink:
        generator = torch.Generator().manual_seed(1)
        options["sink"] = torch.randn(case.heads, generator=generator).to(query).requires_grad_()
    layer = attention(case.size, kernels=kernels, **options)
    found = run(layer, [query, key, value], grad, of_lengths(lengths, documents))
    return [*found, options["sink"].grad] if case.has_sink else found


def errors(
    version: int | None, case: Case, length: int, device: str, *cuts: list[int], documents: tuple | None = None
) -> list[list[float]]:
    """Of the output and the gradients for each of the `cuts`; root mean square, relative."""
    tensors = random(case, length, device)
    in_fp64 = [x.double() for x in tensors]
    exact = attend(case, KernelChoice(backend="unfused"), [length], in_fp64, documents)
    found = []
    for lengths in cuts:
        ours = attend(case, KernelChoice(flash_attention_version=version), lengths, tensors, documents)
        pairs = zip(ours, exact, strict=True)
        found.append([((a.double() - b).square().mean() / b.square().mean()).sqrt().item() for a, b in pairs])
    return found


def compare(report: Report, version: int | None, case: Case, length: int, device: str) -> None:
    uneven = [length - 7 * (length // 9), *[length // 9] * 7]
    whole, cut = errors(version, case, length, device, [length], uneven)
    parts = dict(zip(PARTS, cut, strict=False))
    report.figure("attention errors", package=PACKAGES[version], case=case.name, whole=max(whole), segments=max(cut))
    ratios = [a / b for a, b in zip(cut, whole, strict=True)]
    judged = ratios[:4]  # the gradient of a sink has so few numbers that its ratio is chance
    report.check(
        f"{PACKAGES[version]}, {case.name}: error of 8 segments at most 1.5 times that of the whole",
        max(judged) <= 1.5 and max(*whole, *cut) < 0.02,
        ", ".join(f"{part} {e:.1e} ({r:.2f}x)" for (part, e), r in zip(parts.items(), ratios, strict=True)),
    )


def documents(report: Report, version: int | None, length: int, device: str) -> None:
    """In one call where the kernel can."""
    starts = (0, length // 7, length // 3, length // 3 + 1, length - 2), (0, length // 2)
    halves = [length // 2, length - length // 2]
    (found,) = errors(version, CASES[0], length, device, halves, documents=starts)
    report.figure("attention errors", package=PACKAGES[version], case="packed documents", segments=max(found))
    report.check(
        f"{PACKAGES[version]}, packed documents: attention and gradients stay within each",
        max(found) < 0.01,
        ", ".join(f"{part} {e:.1e}" for part, e in zip(PARTS, found, strict=False)),
    )


def dropout(report: Report, version: int | None, length: int, device: str) -> None:
    """The mask is that of a seed, the same forward and backward, and right in the mean."""
    case = CASES[0]
    query, key, value, grad = random(case, length, device)
    if getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)() is not None:
        torch.nn.attention.restore_flash_attention_impl()  # version 3 has none
    kernels = KernelChoice(flash_attention_version=version, has_dropout=True)
    layer = attention(case.size, dropout=0.2, kernels=kernels)
    segments = of_lengths([length // 4] * 4)

    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return run(layer, [query, key, value], grad, segments)

    first, again, other = drawn(1), drawn(1), drawn(2)
    name = f"{PACKAGES[version]}, dropout"
    same = torch.equal(first[0], again[0])
    report.check(
        f"{name}: a seed gives one output, another seed another",
        same and not torch.equal(first[0], other[0]),
        f"same: {same}",
    )
    # The output is linear in the values, so Σ dV·V = Σ dO·O if the backward has the mask of the forward.
    left = float((first[3].double() * value.double()).sum())
    right = float((first[0].double() * grad.double()).sum())
    spread = float((first[0].double() * grad.double()).square().sum().sqrt())
    report.check(
        f"{name}: the backward has the mask of the forward",
        abs(left - right) <= 0.05 * spread,
        f"{left:.2f} and {right:.2f}, of a spread of {spread:.1f}",
    )
    trials = 64
    outputs = torch.stack([drawn(seed)[0].float() for seed in range(trials)])
    expected = run(attention(case.size, kernels=KernelChoice()), [query, key, value], grad, segments)[0]
    off = (outputs.mean(0) - expected.float()).abs() / (outputs.std(0) / sqrt(trials) + 1e-2)
    report.check(f"{name}: the mean over masks is the output without", off.max() <= 6, f"off by {off.max():.1f} errors")


def why_not_4() -> str | None:
    """Why flash-attn-4 cannot be used here; None if it can."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "it is made for Hopper and Blackwell GPUs"
    try:
        import_module("flash_attn.cute.interface")
    except Exception as error:  # of any kind, from its compiler or its loader
        return str(error)
    return None


def main() -> None:
    args = parser(__doc__).parse_args()
    report = Report(args.output)
    length = 90 if args.tiny else 2052
    for version in (None,) if args.device == "cpu" else PACKAGES:
        if version and (reason := why_not_4()):
            report.figure("packages", package=PACKAGES[version], not_used=reason)
            continue
        for case in CASES:
            with report.attempt(f"{PACKAGES[version]}, {case.name}"):
                compare(report, version, case, length, args.device)
        with report.attempt(f"{PACKAGES[version]}, packed documents"):
            documents(report, version, length, args.device)
        if version != 4:
            with report.attempt(f"{PACKAGES[version]}, dropout"):
                dropout(report, version, 32 if args.tiny else 512, args.device)


if __name__ == "__main__":
    main()
