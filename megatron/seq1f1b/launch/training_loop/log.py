"""The lines that Megatron's training loop prints and writes about iterations.

Tested in launch/test_training_loop.py.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ...process.patches import PatchTable, wrapping
from ...runtime import Reading
from .expert_metrics import ExpertMetrics

_LINE = re.compile(
    r" iteration +(?P<iteration>\d+)/.* elapsed time per iteration \(ms\): (?P<milliseconds>\S+) \|"
    r".* global batch size: +(?P<batch>\d+) \|"
)


class IterationLog:
    """The lines of iterations. `args()` returns Megatron's arguments, `executor()` the executor of our schedules; the
    iterations that are `skipped` have no lines of ours."""

    def __init__(
        self, args: Callable[[], Namespace], executor: Callable[[], Any], skipped: Container[int] = ()
    ) -> None:
        self._args = args
        self._executor = executor
        self._skipped = skipped
        self._tokens: float | None = None  # in the last step, over all replicas, without padding
        self._microbatches: float | None = None  # per replica in that step, on average
        self._expert_metrics = ExpertMetrics()

    def patches(self) -> PatchTable:
        training = "megatron.training.training"
        experts = "megatron.core.transformer.moe.moe_logging.MoEMetricsTracker.report"
        return (
            wrapping(f"{training}.training_log", self.training_log, "averages two losses into the second line"),
            wrapping(f"{training}.print_rank_last", self.print_rank_last, "shows neither tokens/s nor bubble ratios"),
            wrapping(f"{training}.consume_seqlen_stats_in_iteration", self.count_documents, "counts by segment"),
            wrapping(experts, self.report_experts, "counts micro-batches by flags, and layers wrongly"),
            wrapping(f"{training}.report_theoretical_memory", self.report_memory, "counts whole micro-batches"),
        )

    def training_log(
        self,
        upstream: Callable,
        losses: dict[str, Any],
        sums: dict[str, Any],
        *args: Any,
        is_first_iteration: bool = False,
        **more: Any,
    ) -> Any:
        """Megatron prints the first iteration but keeps its loss for the next line, even if an interval ends there; and
        0 for the losses of an interval that has none."""
        if not losses and not sums.get("advanced iterations"):
            of_losses = [name for name, value in sums.items() if isinstance(value, torch.Tensor)]
            for name in of_losses:
                del sums[name]
        is_end = (self._args().curr_iteration + 1) % self._args().log_interval == 0
        return upstream(losses, sums, *args, is_first_iteration=is_first_iteration and not is_end, **more)

    def print_rank_last(self, upstream: Callable[[str], None], message: str) -> None:
        """Append tokens/s, bubble ratios and memory to the line of an iteration, and write them to TensorBoard, wandb.
        All ranks call this with the same message."""
        line = _LINE.search(message)
        if line is None or int(line["iteration"]) in self._skipped:
            upstream(message)
            return
        args = self._args()
        executor = self._executor()
        recorder = None if executor is None else executor.recorder  # of the last training step, by our schedules
        tokens = self._tokens or int(line["batch"]) * args.seq_length
        per_second = tokens / (float(line["milliseconds"]) / 1e3) / args.world_size
        values = {"tokens-per-second-per-gpu": per_second}
        unit = "GPU" if torch.device(torch.cuda.current_device()).type == "cuda" else "process"
        message += f" tokens/s per {unit}: {per_second:.1f} |"
        readings = _of_all_stages(recorder.reading()) if recorder else []
        if readings:
            ratios = _bubble_ratios(readings)
            memory = [reading.peak_memory for reading in readings]
            values["bubble-ratio"] = sum(ratios) / len(ratios)
            values |= {f"bubble-ratio/pipeline-rank-{rank}": ratio for rank, ratio in enumerate(ratios)}
            values |= {f"peak-activation-bytes/pipeline-rank-{rank}": size for rank, size in enumerate(memory)}
            message += f" bubble ratio by pipeline rank (%): {_few([100 * ratio for ratio in ratios])} |"
            message += f" peak activations by pipeline rank (MB): {_few([size / 2**20 for size in memory])} |"
        upstream(message)
        interval = args.tensorboard_log_interval
        iteration = int(line["iteration"])
        if interval and iteration % interval == 0:  # 0 without writers
            _write(values, iteration)

    def count_documents(self, upstream: Callable) -> tuple[float | None, float | None]:
        """The tokens of all documents of a step, and the squares of their lengths; both None where none are packed."""
        tokens, squares = upstream()
        executor = self._executor()
        is_skipped = self._args().curr_iteration + 1 in self._skipped
        documents = None if executor is None else executor.segmentation.documents_of_step
        if not is_skipped and documents is not None:
            replicas = parallel_state.get_data_parallel_group()
            lengths = documents.lengths
            counts = [documents.num_microbatches, sum(lengths), sum(length**2 for length in lengths)]
            sums = torch.tensor(counts, dtype=torch.float64, device=torch.cuda.current_device())
            dist.all_reduce(sums, group=replicas)
            microbatches, tokens, squares = sums.tolist()
            self._microbatches = microbatches / replicas.size()
        self._tokens = tokens
        return tokens, squares

    def report_experts(self, upstream: Callable, tracker: Any, loss_scale: float, *rest: Any, **more: Any) -> str:
        """Average over the micro-batches that ran if documents are kept apart; of all layers with experts, on pipeline
        ranks without such, too."""
        if self._microbatches:
            loss_scale = 1 / self._microbatches
        if more.get("force_initialize"):
            self._expert_metrics.complete(tracker, more["track_names"], more.get("pg_collection"))
        return upstream(tracker, loss_scale, *rest, **more)

    def report_memory(self, upstream: Callable, args: Namespace, *rest: Any, **more: Any) -> None:
        """Megatron's own schedules only: the block at the start estimates ours."""
        if getattr(args, "pipeline_schedule", None) is None and not getattr(args, "pipeline_schedule_file", None):
            upstream(args, *rest, **more)


def _of_all_stages(reading: Reading) -> list[Reading]:
    """The readings of this pipeline. Megatron has already waited for the device."""
    if dist.get_backend() == "fake":
        return []
    group = parallel_state.get_pipeline_model_parallel_group()
    own = torch.tensor(reading, dtype=torch.float64, device=torch.cuda.current_device())
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [Reading(*part.tolist()) for part in parts]


def _bubble_ratios(readings: Sequence[Reading]) -> list[float]:
    """The share of the longest step of any rank in which each rank was idle."""
    step = max(reading.duration for reading in readings)
    return [1 - reading.busy / step for reading in readings]


def _few(values: Sequence[float]) -> str:
    if len(values) <= 8:
        return " ".join(f"{value:.1f}" for value in values)
    return f"{min(values):.1f} to {max(values):.1f}, {sum(values) / len(values):.1f} on average"


def _write(values: dict[str, float], iteration: int) -> None:
    """Write to Megatron's TensorBoard and wandb writers, which only the last rank has."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    tensorboard = get_tensorboard_writer()
    if tensorboard:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    wandb = get_wandb_writer()
    if wandb:
        wandb.log(values, iteration)
