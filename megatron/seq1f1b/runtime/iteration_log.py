"""Our additions to Megatron's line of an iteration, and to its TensorBoard and wandb."""

import re
from argparse import Namespace
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from .recorder import Reading

_LINE = re.compile(r" iteration +(?P<iteration>\d+)/.* elapsed time per iteration \(ms\): (?P<milliseconds>\S+) \|")
_BATCH = re.compile(r" global batch size: +(\d+) \|")
_FEW = 8  # ranks whose values are all in the line


def print_rank_last(
    args: Callable[[], Namespace],
    last_step: Callable[[], Reading | None],
    real_tokens: Callable[[], float | None],
    upstream: Callable[[str], None],
    message: str,
) -> None:
    """Megatron's function, with additions to the line of an iteration; called on all ranks with the same message.

    `args` gives Megatron's arguments, `last_step` the measurements of this rank, None without our schedules,
    `real_tokens` the tokens of a step without padding, None where no sequence is packed.
    """
    line, batch = _LINE.search(message), _BATCH.search(message)
    if line is None or batch is None:
        upstream(message)
        return
    flags, iteration = args(), int(line["iteration"])
    seconds = float(line["milliseconds"]) / 1e3
    readings = _of_all_stages(last_step())
    tokens = real_tokens() or int(batch[1]) * flags.seq_length
    values = {"tokens-per-second-per-gpu": tokens / seconds / flags.world_size}
    unit = "GPU" if _is_on_gpu() else "process"
    words = [f"tokens/s per {unit}: {values['tokens-per-second-per-gpu']:.1f}"]
    if readings:
        step = max(reading.duration for reading in readings)
        idle = [1 - reading.busy / step for reading in readings]
        memory = [reading.peak_memory for reading in readings]
        values |= {"idle-share": sum(idle) / len(idle)}
        values |= {f"idle-share/pipeline-rank-{rank}": share for rank, share in enumerate(idle)}
        values |= {f"peak-activation-bytes/pipeline-rank-{rank}": size for rank, size in enumerate(memory)}
        words.append(f"idle by pipeline rank (%): {_few([100 * share for share in idle])}")
        words.append(f"peak activations by pipeline rank (MB): {_few([size / 2**20 for size in memory])}")
    upstream(message + "".join(f" {each} |" for each in words))
    interval = flags.tensorboard_log_interval  # may be 0 without writers
    if interval and iteration % interval == 0:
        _write(values, iteration)


def _is_on_gpu() -> bool:
    return torch.device(torch.cuda.current_device()).type == "cuda"


def _of_all_stages(reading: Reading | None) -> list[Reading]:
    """The readings of this pipeline, by one small collective. Megatron has already waited for the device."""
    if reading is None or dist.get_backend() == "fake":
        return []
    group = parallel_state.get_pipeline_model_parallel_group()
    own = torch.tensor(reading, dtype=torch.float64, device=torch.cuda.current_device())
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [Reading(*part.tolist()) for part in parts]


def _few(values: Sequence[float]) -> str:
    if len(values) <= _FEW:
        return " ".join(f"{value:.1f}" for value in values)
    return f"{min(values):.1f} to {max(values):.1f}, {sum(values) / len(values):.1f} on average"


def _write(values: dict[str, float], iteration: int) -> None:
    """To Megatron's writers, which only the last rank has."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)
