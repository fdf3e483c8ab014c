"""Attention by segments in bf16 against fp64, beside the errors of the same kernel on whole sequences."""

from importlib import import_module
from math import sqrt

import torch
from common import Report, parse

from megatron.seq1f1b.model.kernels import AttentionRule, KernelChoice
from support.segments import attention, inputs, of_lengths, run

# What it is, sequences, query heads, KV heads, head size of queries and keys, of values.
CASES = [
    ("heads of 64", 2, 8, 8, 64, 64),
    ("heads of 80", 1, 8, 8, 80, 80),
    ("heads of 96", 1, 8, 8, 96, 96),
    ("heads of 128, 4 to a KV head", 2, 16, 4, 128, 128),
    ("heads of 256", 1, 4, 4, 256, 256),
    ("latent attention, 192 and 128", 1, 8, 8, 192, 128),
    ("heads of 100", 1, 4, 4, 100, 100),
]
PARTS = ("output", "dQ", "dK", "dV")
PACKAGES = {None: "PyTorch", 4: "flash-attn-4"}


def random(case: tuple, length: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [x.to(device) for x in inputs(length, case[1:], torch.bfloat16)]


def attend(layer, lengths: list[int], *tensors: torch.Tensor, documents: tuple | None = None) -> list[torch.Tensor]:
    return run(layer, tensors[:3], tensors[3], of_lengths(lengths, documents))


def errors(version: int | None, case: tuple, tensors: list[torch.Tensor], *cuts: list[int], documents=None) -> list:
    """Of the output and the gradients for each of the `cuts`; root mean square, relative."""
    layer = attention(case[4], kernels=KernelChoice(flash_attention_version=version))
    whole = [sum(cuts[0])], *(x.double() for x in tensors)
    exact = attend(attention(case[4], kernels=KernelChoice(backend="unfused")), *whole, documents=documents)
    return [
        [
            ((a.double() - b).square().mean() / b.square().mean()).sqrt().item()
            for a, b in zip(attend(layer, lengths, *tensors, documents=documents), exact, strict=True)
        ]
        for lengths in cuts
    ]


def compare(report: Report, version: int | None, case: tuple, length: int, device: str) -> None:
    uneven = [length - 7 * (length // 9), *[length // 9] * 7]
    whole, cut = errors(version, case, random(case, length, device), [length], uneven)
    ratios = [a / b for a, b in zip(cut, whole, strict=True)]
    report.check(
        f"{PACKAGES[version]}, {case[0]}: error of 8 segments at most 1.5 times that of the whole",
        max(ratios) <= 1.5 and max(whole) < 0.02,
        ", ".join(f"{part} {e:.1e} ({r:.2f}x)" for part, e, r in zip(PARTS, cut, ratios, strict=True)),
    )


def documents(report: Report, version: int | None, length: int, device: str) -> None:
    """In one call where the kernel can."""
    starts = (0, length // 7, length // 3, length // 3 + 1, length - 2), (0, length // 2)
    halves = [length // 2, length - length // 2]
    (found,) = errors(version, CASES[0], random(CASES[0], length, device), halves, documents=starts)
    report.check(
        f"{PACKAGES[version]}, packed documents: attention and gradients stay within each",
        max(found) < 0.01,
        ", ".join(f"{part} {e:.1e}" for part, e in zip(PARTS, found, strict=True)),
    )


def dropout(report: Report, version: int | None, length: int, device: str) -> None:
    """The mask is that of a seed, the same forward and backward, and right in the mean."""
    case = CASES[0]
    _, _, value, grad = tensors = random(case, length, device)
    if getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)() is not None:
        torch.nn.attention.restore_flash_attention_impl()  # version 3 has none
    layer = attention(case[4], dropout=0.2, kernels=KernelChoice(flash_attention_version=version, has_dropout=True))
    lengths = [length // 4] * 4

    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return attend(layer, lengths, *tensors)

    first, again, other = drawn(1), drawn(1), drawn(2)
    name = f"{PACKAGES[version]}, dropout"
    same = torch.equal(first[0], again[0])
    report.check(
        f"{name}: a seed gives one output, another seed another",
        same and not torch.equal(first[0], other[0]),
        f"same: {same}",
    )
    # The output is linear in the values, so Σ dV·V = Σ dO·O if the backward has the mask of the forward.
    left, right = (float((a.double() * b.double()).sum()) for a, b in ((first[3], value), (first[0], grad)))
    spread = float((first[0].double() * grad.double()).square().sum().sqrt())
    report.check(
        f"{name}: the backward has the mask of the forward",
        abs(left - right) <= 0.05 * spread,
        f"{left:.2f} and {right:.2f}, of a spread of {spread:.1f}",
    )
    trials = 64
    outputs = torch.stack([drawn(seed)[0].float() for seed in range(trials)])
    expected = attend(attention(case[4], kernels=KernelChoice()), lengths, *tensors)[0]
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
    args = parse()
    report = Report(args.output)
    length = 90 if args.tiny else 2052
    if args.device == "cuda":
        report.figure(kernel=KernelChoice().name(AttentionRule(1.0), True, torch.bfloat16, 128, 128))
    for version in (None,) if args.device == "cpu" else PACKAGES:
        if version and (reason := why_not_4()):
            report.figure(package=PACKAGES[version], not_used=reason)
            continue
        for case in CASES:
            with report.attempt(f"{PACKAGES[version]}, {case[0]}"):
                compare(report, version, case, length, args.device)
        with report.attempt(f"{PACKAGES[version]}, packed documents"):
            documents(report, version, length, args.device)
        if version != 4:
            with report.attempt(f"{PACKAGES[version]}, dropout"):
                dropout(report, version, 32 if args.tiny else 512, args.device)


if __name__ == "__main__":
    main()
