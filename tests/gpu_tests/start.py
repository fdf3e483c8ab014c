"""The versions of what runs, and what the device can do at most: matrix products, copies, its link to the host.

It runs before all others, and imports what they import: a cold disk is read here, outside of their limits.
"""

import importlib
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch
import torch.distributed.run  # noqa: F401 - which starts the ranks of other sections

from gpu_tests import nccl
from gpu_tests.common import GIB, Report, dtype_of, parser, seconds, start_megatron
from megatron.seq1f1b.model import link_rate
from megatron.seq1f1b.model.kernels import AttentionRule, KernelChoice, Saved

PACKAGES = ("megatron-core", "triton", "transformers", "transformer-engine", "flash-attn", "flash-attn-4")
# Imported by pretrain_gpt.py alone.
OF_TRAINING = ("megatron.training", "megatron.core.datasets.gpt_dataset", "megatron.core.tokenizers.text.models")
REPEATS = 5


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", printed)
    return found and found[0]


def versions(report: Report, device: str) -> None:
    of_nccl = nccl.version()
    values = {
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "CUDA": torch.version.cuda,
        "driver": driver(),
        "NCCL": of_nccl and ".".join(map(str, of_nccl)),
    }
    values |= {package: installed(package) for package in PACKAGES}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        values |= {"memory": f"{card.total_memory / GIB:.1f} GiB", "multiprocessors": card.multi_processor_count}
        kernel = KernelChoice().name(AttentionRule(1.0), True, torch.bfloat16, 128, 128)
        values["attention"] = kernel
    report.figure("versions", **{name: value for name, value in values.items() if value is not None})


def warm_up(device: str) -> None:
    """Load the libraries and the kernels that other sections call."""
    for name in OF_TRAINING:
        importlib.import_module(name)
    start_megatron(device)
    dtype = dtype_of(device)
    for size in (64, 128):
        query, key, value = torch.randn(3, 256, 1, 2, size, device=device, dtype=dtype)
        kernel = KernelChoice().kernel(AttentionRule(size**-0.5), query, value)
        output, statistics = kernel.forward(query, key, value)
        kernel.backward(output, Saved(query, key, value, output, statistics))


def ceilings(report: Report, device: str, tiny: bool) -> None:
    """Of one large product, of a copy inside the device, and of the link to the host, there and back at once."""
    side, size = (256, 1 << 20) if tiny else (8192, GIB)
    left, right = torch.randn(2, side, side, device=device, dtype=dtype_of(device))
    here = torch.zeros(2, size, dtype=torch.uint8, device=device)
    product = median(seconds(device, lambda: left @ right)[0] for _ in range(1 + REPEATS))
    copy = median(seconds(device, lambda: here[0].copy_(here[1]))[0] for _ in range(1 + REPEATS))
    report.figure(
        "ceilings",
        product_tflops=2 * side**3 / product / 1e12,
        copy_gb_per_s=2 * size / copy / 1e9,  # read and written
        link_gb_per_s=link_rate(torch.device(device), lambda: None) / 1e9,
    )


def main() -> None:
    args = parser(__doc__).parse_args()
    report = Report(args.output)
    versions(report, args.device)
    warm_up(args.device)
    ceilings(report, args.device, args.tiny)
    (found,) = (figure for figure in report.figures if figure["table"] == "ceilings")
    product = found["product_tflops"]
    copy = found["copy_gb_per_s"]
    link = found["link_gb_per_s"]
    report.check(
        "the device computes and copies",
        min(product, copy, link) > 0,
        f"a large product {product:.3g} TFLOPS, a copy {copy:.3g} GB/s, the link {link:.3g} GB/s each way",
    )


if __name__ == "__main__":
    main()
