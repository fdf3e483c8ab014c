"""With `--dry-run` Megatron's `pretrain` rehearses the launch, in one process per pipeline stage."""

import json
import logging
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.typed import read_json
from ..files.writing import written_whole
from ..process.child_processes import end_with_parent
from ..process.patches import Patch, PatchTable, wrapping
from ..report import plot_memory

if TYPE_CHECKING:
    from .report import RehearsalReport

# Arguments of Megatron that a rehearsal switches off: it reads no checkpoint and no values, and writes no file.
_OFF = (
    "async_save",
    "check_weight_hash_across_dp_replicas_interval",
    "gpu_sniff_test_interval",
    "load",
    "log_num_zeros_in_grad",
    "log_progress",
    "log_straggler",
    # The optimizer's step before the rehearsed one would gather parameters that no forward waits for.
    "overlap_param_gather_with_optimizer_step",
    "pretrained_checkpoint",
    "profile",
    "run_workload_inspector_server",
    "save",
    "tp_comm_overlap",
)
_GPT2_WORDS = 50257
_LONGEST = 4000  # characters of a stage's output


def prepare(environment: Mapping[str, str]) -> None:
    """Raise ValueError unless the program was started as one process, with the number of GPUs in WORLD_SIZE; to be
    called before Megatron is imported."""
    # The cluster of the launch has the packages that this machine lacks.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)")
    size = environment.get("WORLD_SIZE")
    way_out = "start it without torchrun, with the number of GPUs of the real launch: WORLD_SIZE=64 python "
    way_out += "pretrain_gpt.py ... --dry-run"
    if "TORCHELASTIC_RUN_ID" in environment or environment.get("RANK", "0") != "0":
        raise ValueError(f"--dry-run plays all ranks in one program; {way_out}")
    if size is None:
        raise ValueError(f"--dry-run plays all ranks of WORLD_SIZE, which is not set; {way_out}")
    if re.fullmatch("[0-9]{1,9}", size) is None or int(size) == 0:
        raise ValueError(f"--dry-run plays all ranks of WORLD_SIZE, and {size!r} is no number of GPUs; {way_out}")


def patches(
    rehearse_in: Callable[[Any], None],
    bytes_outside: Callable[[int], int],
    device_memory: Callable[[Namespace], float],
) -> PatchTable:
    """The patches that `install` applies for a rehearsal; `rehearse_in(surroundings)` gives its steps theirs. With that
    many communicators a GPU holds `bytes_outside(communicators)` outside PyTorch's allocator; by the arguments of the
    launch it has `device_memory(arguments)` bytes."""
    rehearse = partial(_rehearse, rehearse_in, bytes_outside, device_memory)
    return (
        wrapping("megatron.training.arguments.parse_args", _parse_for_the_real_device, "looks for a GPU here"),
        Patch("torch.cuda.get_device_capability", lambda *_: (10, 0), "looks for a GPU here"),
        wrapping("megatron.training.global_vars.build_tokenizer", _build_empty_tokenizer, "reads files of the cluster"),
        Patch("megatron.training.arguments._print_args", lambda *_: None, "prints 700 lines ahead of what was found"),
        wrapping("megatron.training.training.pretrain", rehearse, "trains instead of rehearsing"),
        wrapping("megatron.training.pretrain", rehearse, "trains instead of rehearsing"),
    )


def _parse_for_the_real_device(parse_args: Callable, *args: Any, **kwargs: Any) -> Namespace:
    """A launch is for GPUs unless `--device cpu` is given; neither a trace nor a log of the training is written."""
    namespace = parse_args(*args, **kwargs)
    if getattr(namespace, "device", None) == "auto":  # Megatron also parses for itself, without our flags
        namespace.device = "cuda"
    namespace.pipeline_trace = None
    namespace.pipeline_trace_iterations = None
    namespace.tensorboard_dir = None
    namespace.wandb_project = ""
    return namespace


def _build_empty_tokenizer(build_tokenizer: Callable, args: Namespace) -> Any:
    """Megatron's empty tokenizer in place of the launch's, if its flags have the size of the vocabulary."""
    kind = args.tokenizer_type
    file = Path(args.vocab_file or "")
    if kind == "GPT2BPETokenizer" and not args.vocab_size:
        # Megatron looks up at a hub what the flag for the file does not name.
        args.vocab_size = len(read_json(file, dict[str, int])) if file.is_file() else _GPT2_WORDS
    if args.vocab_size:
        args.tokenizer_type = "NullTokenizer"
    try:
        return build_tokenizer(args)
    except Exception as error:
        raise SystemExit(
            f"error: a rehearsal needs the size of the vocabulary, and --tokenizer-type {kind} cannot be loaded "
            f"here ({' '.join(str(error).split())[:200]}); give --vocab-size."
        ) from None


def _rehearse(
    rehearse_in: Callable[[Any], None],
    bytes_outside: Callable[[int], int],
    device_memory: Callable[[Namespace], float],
    pretrain: Callable,
    *args: Any,
    **kwargs: Any,
) -> None:
    from megatron.training import get_args

    from .launch import check_launch, hint_of_smaller_batch, in_words, replacements
    from .report import RehearsalReport, StageReport
    from .stage import RehearsedStage

    launch = get_args()
    check_launch(launch)
    hint = hint_of_smaller_batch(launch)
    if hint is not None:
        print(hint, file=sys.stderr, flush=True)
    vars(launch).update(dict.fromkeys(_OFF))
    launch.fake_process_group = True
    launch.rerun_mode = "disabled"

    def run_stage() -> StageReport:
        return RehearsedStage(launch, rehearse_in, bytes_outside).run(partial(pretrain, *args, **kwargs))

    stages = run_stages(run_stage, launch, _ranks_of_a_pipeline(launch))
    report = RehearsalReport(
        launch=in_words(launch),
        device_memory=int(device_memory(launch)),
        stages=stages,
        notes=replacements(launch),
    )
    print(report.as_text(), flush=True)
    if launch.dry_run_output is not None:
        _write(report, launch.dry_run_output)
    for problem in report.problems:
        print(f"error: {problem}.", file=sys.stderr)
    raise SystemExit(1 if report.problems else 0)


def _ranks_of_a_pipeline(launch: Namespace) -> Sequence[int]:
    """The global ranks of one pipeline of the launch, from its first stage to its last."""
    num_stages = launch.pipeline_model_parallel_size
    stride = launch.world_size // num_stages
    if launch.use_tp_pp_dp_mapping:
        stride = launch.tensor_model_parallel_size * launch.context_parallel_size
    return range(0, stride * num_stages, stride)


def _write(report: "RehearsalReport", folder: Path) -> None:
    """Write the report as JSON, and as a picture if matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(folder / "rehearsal.json") as unfinished:
        unfinished.write_text(json.dumps(report.as_json()) + "\n")
    if find_spec("matplotlib") is None:
        print(f"No picture in {folder}: matplotlib is not installed.")
    else:
        plot_memory(report.as_json(), folder / "memory.png")


def run_stages(run_stage: Callable[[], Any], args: Namespace, ranks: Sequence[int]) -> list[Any]:
    """The reports of the stages, in the order of `ranks`, their global ranks; ends the program as soon as one fails.
    `run_stage` runs the stage of `args.rank` in a fork of this process. As many run at once as there are cores."""
    from torch.multiprocessing import ProcessExitedException, start_processes
    from tqdm import tqdm

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # the end of a stage is reported below
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slots = multiprocessing.get_context("fork").Semaphore(num_cores)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tqdm(total=len(ranks), desc="Rehearsing pipeline stages", disable=None, leave=False) as bar,
    ):
        files = [Path(folder, str(rank)) for rank in ranks]
        stages = start_processes(
            _run, (run_stage, args, ranks, files, slots), len(ranks), join=False, daemon=True, start_method="fork"
        )
        try:
            while not stages.join(timeout=1):
                bar.n = sum(file.exists() for file in files)
                bar.refresh()
        except ProcessExitedException as failure:
            log = files[failure.error_index].with_suffix(".log").read_text(errors="replace")
            sys.stderr.write(log[-_LONGEST:])  # it ends with the error
            if not failure.signal_name:
                raise SystemExit(failure.exit_code) from None
            rank = ranks[failure.error_index]
            raise SystemExit(f"error: the process of rank {rank} was ended by {failure.signal_name}.") from None
        return [pickle.loads(file.read_bytes()) for file in files]


def _run(
    index: int, run_stage: Callable[[], Any], args: Namespace, ranks: Sequence[int], files: Sequence[Path], slots: Any
) -> None:
    """Run one stage in its process: write its report to its file, print to a log beside it, end with the program."""
    end_with_parent()
    with files[index].with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    args.rank = ranks[index]
    os.environ["RANK"] = str(args.rank)
    try:
        with slots:
            report = pickle.dumps(run_stage())
        files[index].write_bytes(report)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
