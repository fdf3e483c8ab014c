"""Wrappers of functions of Megatron's training loop."""

import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from ..process.patches import Patch, wrapping
from ..process.ranks import warn_on_rank_0
from .parameter_groups import ParameterGroups
from .skipped_iterations import SkippedIterations
from .tracer import Reading

_LINE = re.compile(
    r" iteration +(?P<iteration>\d+)/.* elapsed time per iteration \(ms\): (?P<milliseconds>\S+) \|"
    r".* global batch size: +(?P<batch>\d+) \|"
)


class TrainingLoop:
    """Wraps functions of Megatron's training loop; `args()` returns its arguments, `executor()` the executor of our
    schedules."""

    def __init__(self, args: Callable[[], Namespace], executor: Callable[[], Any]) -> None:
        self._args = args
        self._executor = executor
        self._tokens: float | None = None  # in the last step, over all replicas, without padding
        self._microbatches: float | None = None  # per replica in that step, on average
        self._skipped = SkippedIterations(args)
        self._parameter_groups = ParameterGroups(args)

    def patches(self) -> tuple[Patch, ...]:
        """Each row names the fault of one of Megatron's functions."""
        training, core = "megatron.training.training", "megatron.core"
        data = f"{core}.datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder.build_generic_dataset"
        experts = f"{core}.transformer.moe.moe_logging.MoEMetricsTracker.report"

        def exit_silently(upstream: Callable, detector: Any, *_: Any) -> None:
            upstream(detector, None, None, None)

        return (
            wrapping(f"{training}.build_train_valid_test_data_loaders", self.loaders, "evaluates without data"),
            wrapping(f"{training}.training_log", self.training_log, "averages two losses into the second line"),
            wrapping(f"{training}.print_rank_last", self.print_rank_last, "shows neither tokens/s nor idle ranks"),
            wrapping(f"{training}.consume_seqlen_stats_in_iteration", self.count_documents, "counts by segment"),
            wrapping(experts, self.report_experts, "divides by the micro-batches of the flags, but units make others"),
            wrapping(f"{training}.report_theoretical_memory", self.report_memory, "counts whole micro-batches"),
            wrapping(f"{training}.save_checkpoint_and_time", self.save, "names no folder if it fails, and needs one"),
            wrapping(f"{training}.load_checkpoint", self.load, "exits with code 0 if it cannot load"),
            wrapping(f"{core}.utils.StragglerDetector.__exit__", exit_silently, "logs exceptions on every rank, too"),
            Patch(data, lambda old: staticmethod(partial(_built, old)), "adds up epochs of no tokens for ever", True),
            wrapping(f"{core}.dist_checkpointing.load_content_metadata", self.metadata, "takes any optimizer's state"),
            *self._parameter_groups.patches(),
            *self._skipped.patches(),
        )

    def loaders(self, upstream: Callable, provider: Callable) -> tuple:
        """Turn evaluations off if no data set is left for them."""
        was_valid = getattr(self._args(), "do_valid", False)
        train, valid, test = upstream(provider)
        has_valid = [bool(valid) and valid[0] is not None]
        dist.broadcast_object_list(has_valid)
        self._args().do_valid = was_valid or self._args().do_valid and has_valid[0]
        return train, valid, test

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
            for name in [name for name, value in sums.items() if isinstance(value, torch.Tensor)]:
                del sums[name]
        is_end = (self._args().curr_iteration + 1) % self._args().log_interval == 0
        return upstream(losses, sums, *args, is_first_iteration=is_first_iteration and not is_end, **more)

    def print_rank_last(self, upstream: Callable[[str], None], message: str) -> None:
        """Add to the line of an iteration, TensorBoard and wandb; called on all ranks with the same message."""
        line = _LINE.search(message)
        if line is None or int(line["iteration"]) in self._skipped:
            upstream(message)
            return
        args, executor = self._args(), self._executor()
        recorder = executor and executor.recorder  # of the last training step, by our schedules
        tokens = self._tokens or int(line["batch"]) * args.seq_length
        per_second = tokens / (float(line["milliseconds"]) / 1e3) / args.world_size
        values = {"tokens-per-second-per-gpu": per_second}
        unit = "GPU" if torch.device(torch.cuda.current_device()).type == "cuda" else "process"
        message += f" tokens/s per {unit}: {per_second:.1f} |"
        if readings := _of_all_stages(recorder.reading()) if recorder else []:
            step = max(reading.duration for reading in readings)
            idle = [1 - reading.busy / step for reading in readings]
            memory = [reading.peak_memory for reading in readings]
            values |= {"idle-share": sum(idle) / len(idle)}
            values |= {f"idle-share/pipeline-rank-{rank}": share for rank, share in enumerate(idle)}
            values |= {f"peak-activation-bytes/pipeline-rank-{rank}": size for rank, size in enumerate(memory)}
            message += f" idle by pipeline rank (%): {_few([100 * share for share in idle])} |"
            message += f" peak activations by pipeline rank (MB): {_few([size / 2**20 for size in memory])} |"
        upstream(message)
        interval, iteration = args.tensorboard_log_interval, int(line["iteration"])
        if interval and iteration % interval == 0:  # 0 without writers
            _write(values, iteration)

    def count_documents(self, upstream: Callable) -> tuple[float | None, float | None]:
        """The tokens of all documents of a step, and the squares of their lengths; both None where none are packed."""
        tokens, squares = upstream()
        executor = self._executor()
        is_skipped = self._args().curr_iteration + 1 in self._skipped
        if not is_skipped and (apart := executor and executor.segmentation.apart) is not None:
            replicas, (number, lengths) = parallel_state.get_data_parallel_group(), apart
            counts = [number, sum(lengths), sum(length**2 for length in lengths)]
            sums = torch.tensor(counts, dtype=torch.float64, device=torch.cuda.current_device())
            dist.all_reduce(sums, group=replicas)
            microbatches, tokens, squares = sums.tolist()
            self._microbatches = microbatches / replicas.size()
        self._tokens = tokens
        return tokens, squares

    def report_experts(self, upstream: Callable, tracker: Any, loss_scale: float, *rest: Any, **more: Any) -> str:
        """Average over the micro-batches that ran if documents are kept apart."""
        return upstream(tracker, 1 / self._microbatches if self._microbatches else loss_scale, *rest, **more)

    def report_memory(self, upstream: Callable, args: Namespace, *rest: Any, **more: Any) -> None:
        """Megatron's own schedules only: the block at the start estimates ours."""
        if getattr(args, "pipeline_schedule", None) is None and not getattr(args, "pipeline_schedule_file", None):
            upstream(args, *rest, **more)

    def save(self, upstream: Callable, iteration: int, *rest: Any, **more: Any) -> None:
        """Megatron's loop saves after a loss that is not a number, even without --save."""
        folder = self._args().save
        if folder is None:
            warn_on_rank_0(f"nothing is saved of iteration {iteration}, since --save is not given")
            return
        try:
            upstream(iteration, *rest, **more)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            last, free = Path(folder, "latest_checkpointed_iteration.txt"), shutil.disk_usage(folder).free / 2**20
            complete = last.read_text().strip() if last.is_file() else "none"
            kept = f"the last complete one is {complete}; {folder} has {free:.0f} MiB free"
            error.add_note(f"the checkpoint of iteration {iteration} was not saved; {kept}")
            raise

    def load(self, upstream: Callable, *rest: Any, **more: Any) -> Any:
        """Megatron prints the reason and exits with code 0 for some bad checkpoints."""
        try:
            return upstream(*rest, **more)
        except SystemExit as error:
            folder = self._args().load or self._args().pretrained_checkpoint
            raise RuntimeError(f"Megatron cannot load {folder}; what it printed last is the reason") from error

    def metadata(self, upstream: Callable, *rest: Any, preloaded_state_dict: Any, **more: Any) -> Any:
        """Of the optimizer's state in a checkpoint, which is saved in one form with the distributed optimizer and in
        another without it. Raises ValueError if the run has the other one."""
        args, found = self._args(), upstream(*rest, preloaded_state_dict=preloaded_state_dict, **more)
        saved = preloaded_state_dict.get("args")
        if found is None or saved is None or args.no_load_optim or args.finetune or saved.no_save_optim:
            return found
        is_saved_with = "distrib_optim_sharding_type" in found
        is_loaded_with = args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer
        if is_saved_with != is_loaded_with:
            with_it, change = ("with", "add") if is_saved_with else ("without", "drop")
            raise ValueError(
                f"the checkpoint in {args.load} was saved {with_it} --use-distributed-optimizer; {change} that flag, "
                "or go on from the weights with --no-load-optim"
            )
        return found


def _built(upstream: Callable, kind: Any, is_built: Callable[[], bool], synchronizes: bool, *arguments: Any) -> Any:
    """A data set; None for a part of --split that has too few documents."""
    if not is_built() or not _is_left_out(kind, arguments):
        return upstream(kind, is_built, synchronizes, *arguments)
    if synchronizes and dist.is_initialized():
        dist.barrier()  # ranks that build nothing wait there
    return None


def _is_left_out(kind: Any, arguments: tuple) -> bool:
    """Whether a part for evaluations has no tokens; raises ValueError for training."""
    if kind is BlendedDataset:
        return None in arguments[0]
    if not (isinstance(kind, type) and issubclass(kind, GPTDataset)):
        return False
    dataset, _, indices, _, split, config = arguments
    # Megatron has no indices with --dataloader-fast-cache-load.
    if indices is None or any(dataset.sequence_lengths[index] for index in indices):
        return False
    reason = (
        f"{dataset.path_prefix} has {len(dataset.document_indices) - 1} documents, none of them for the {split.name} "
        f"part of --split {config.split}; give that part a larger share, or take more text"
    )
    if split is Split.train:
        raise ValueError(reason)
    warn_on_rank_0(f"{reason}. There is no {split.name} part.")
    return True


def _of_all_stages(reading: Reading) -> list[Reading]:
    """The readings of this pipeline. Megatron has already waited for the device."""
    if dist.get_backend() == "fake":
        return []
    group = parallel_state.get_pipeline_model_parallel_group()
    own = torch.tensor(reading, dtype=torch.float64, device=torch.cuda.current_device())
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [Reading(*part.tolist()) for part in parts]


def _few(values: Sequence[float]) -> str:
    if len(values) <= 8:
        return " ".join(f"{value:.1f}" for value in values)
    return f"{min(values):.1f} to {max(values):.1f}, {sum(values) / len(values):.1f} on average"


def _write(values: dict[str, float], iteration: int) -> None:
    """Write to Megatron's TensorBoard and wandb writers, which only the last rank has."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    if writer := get_tensorboard_writer():
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(values, iteration)
