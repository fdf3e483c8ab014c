"""What the sections of the GPU suite share: flags, checks, clocks, and attention by segments."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.seq1f1b import cpu

if "cpu" in sys.argv:
    cpu.activate()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from megatron.seq1f1b.model.attention import SegmentAttention  # noqa: E402
from megatron.seq1f1b.model.segment import Segment, SegmentContext  # noqa: E402

# Before the lines that the suite shows while a section runs.
MARK = "  · "


def parse(**extra: Any) -> argparse.Namespace:
    """`--device` and `--tiny`, which makes every size small enough for a CPU; `extra` are further flags' defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    for name, default in extra.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


@dataclass
class Report:
    """Checks and figures of one section, written after each so that a time limit loses none."""

    path: Path
    checks: list[dict] = field(default_factory=list)
    figures: list[dict] = field(default_factory=list)

    def check(self, name: str, passed: bool | None, found: str) -> None:
        """`passed` is None for goals of speed and memory where sizes are tiny."""
        self.checks.append({"name": name, "passed": passed if passed is None else bool(passed), "found": found})
        print(f"{MARK}{verdict(passed):12}{name}: {found}", flush=True)
        self._write()

    def figure(self, **values: Any) -> None:
        self.figures.append(values)
        print(MARK + ", ".join(f"{name} {_text(value)}" for name, value in values.items()), flush=True)
        self._write()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A check `name` that fails if the body raises; the checks after it are made."""
        try:
            yield
        except Exception as error:
            first_line, *_ = str(error).splitlines() or [""]
            self.check(name, False, f"{type(error).__name__}: {first_line}")

    def _write(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        unfinished = self.path.with_suffix(".unfinished")  # the time may be up in the middle of it
        unfinished.write_text(json.dumps(content, indent=1))
        unfinished.replace(self.path)


def verdict(passed: bool | None) -> str:
    return {None: "not judged", True: "ok", False: "FAILED"}[passed if passed is None else bool(passed)]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(device: str, work: Callable[[], Any]) -> tuple[float, Any]:
    """How long `work` takes until the device is done with it, and its result."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return time.perf_counter() - start, result


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def patience(device: str) -> timedelta:
    """How long ranks wait for each other: less than a section takes, so that one that hangs fails."""
    return timedelta(seconds=30 if device == "cuda" else 120)


def start_megatron(device: str, backend: str = "gloo", chunks: int = 1) -> None:
    """Megatron's groups: of this process alone, or of the ranks that torchrun started, as one pipeline."""
    timeout = patience(device)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(
        1,
        dist.get_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    model_parallel_cuda_manual_seed(1)


def bounds_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of segments of these lengths."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def segments_of(lengths: Sequence[int], documents: tuple | None = None) -> list[Segment]:
    return [Segment(0, i, a, b, sum(lengths), documents) for i, (a, b) in enumerate(bounds_of(lengths))]


def attention_layer(kernels, head_size: int, dropout: float = 0.0) -> SegmentAttention:
    """Attention by what `kernels` chooses; its dropout draws from PyTorch's own generator."""
    config = SimpleNamespace(
        kv_channels=head_size, softmax_scale=None, attention_dropout=dropout, sequence_parallel=True
    )
    layer = SegmentAttention(config, kernels=kernels)
    layer.context = SegmentContext()
    return layer


class Attended:
    """A sequence through an attention layer, segment by segment: `forward`, then `backward`."""

    def __init__(
        self, layer: SegmentAttention, lengths: Sequence[int], query, key, value, grad, documents: tuple | None = None
    ) -> None:
        self.layer, self.segments, self.grad = layer, segments_of(lengths, documents), grad
        self.parts = [
            [x[s.start : s.end].detach().requires_grad_() for x in (query, key, value)] for s in self.segments
        ]
        self.outputs: list[torch.Tensor] = []

    def forward(self) -> None:
        for segment, part in zip(self.segments, self.parts, strict=True):
            with self.layer.context.running(segment, keeps_for_backward=True):
                self.outputs.append(self.layer(*part))

    def backward(self) -> None:
        for segment, output in zip(reversed(self.segments), reversed(self.outputs), strict=True):
            with self.layer.context.running(segment, keeps_for_backward=True):
                output.backward(self.grad[segment.start : segment.end])

    def results(self) -> list[torch.Tensor]:
        """Output and gradients of query, key and value."""
        grads = [torch.cat([part[i].grad for part in self.parts]) for i in range(3)]
        return [torch.cat(self.outputs).detach(), *grads]


def attend(layer: SegmentAttention, lengths: Sequence[int], *tensors, documents=None) -> list[torch.Tensor]:
    attended = Attended(layer, lengths, *tensors, documents=documents)
    attended.forward()
    attended.backward()
    return attended.results()
