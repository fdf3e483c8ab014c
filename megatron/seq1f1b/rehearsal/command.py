"""What `--dry-run` does to a training script: Megatron's `pretrain` rehearses, in one process per pipeline stage."""

import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from ..process.patches import Patch, PatchTable, wrapping
from ..process.ranks import end_with_parent
from ..report import plot_memory

# Arguments of Megatron in a rehearsal, which reads no checkpoint and no values, writes no file and starts no process.
_INSTEAD = {
    "fake_process_group": True,
    "rerun_mode": "disabled",
    **dict.fromkeys(("load", "pretrained_checkpoint", "save"), None),
    **dict.fromkeys(("check_weight_hash_across_dp_replicas_interval", "gpu_sniff_test_interval"), None),
    **dict.fromkeys(("async_save", "log_num_zeros_in_grad", "log_progress", "log_straggler", "profile"), False),
    **dict.fromkeys(("run_workload_inspector_server", "tp_comm_overlap"), False),
    # The step of the optimizer before the one that is rehearsed would gather what no forward waits for.
    "overlap_param_gather_with_optimizer_step": False,
}
# The vocabulary of GPT-2, which Megatron's GPT2BPETokenizer looks up at a hub.
_GPT2_WORDS = 50257
_LONGEST = 4000  # characters of what a stage has printed


def prepare(environment: Mapping[str, str]) -> None:
    """End the program unless it was started as one process; to be called before Megatron is imported."""
    # The cluster of the launch has the packages that this machine lacks.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)")
    command = "WORLD_SIZE=64 python pretrain_gpt.py ... --dry-run"
    if "TORCHELASTIC_RUN_ID" in environment or environment.get("RANK", "0") != "0":
        raise SystemExit(f"error: --dry-run plays all ranks in one program, so start it without torchrun: {command}")
    if not environment.get("WORLD_SIZE", "").isdigit() or int(environment["WORLD_SIZE"]) == 0:
        raise SystemExit(f"error: --dry-run needs the number of GPUs of the real launch: {command}")


def patches() -> PatchTable:
    """What `install` binds for a rehearsal."""
    return (
        wrapping("megatron.training.arguments.parse_args", _parse_for_the_real_device, "looks for a GPU here"),
        Patch("torch.cuda.get_device_capability", lambda *_: (10, 0), "looks for a GPU here"),
        wrapping(
            "megatron.training.global_vars.build_tokenizer",
            _build_empty_tokenizer,
            "reads files of the cluster, or a hub, for the size of the vocabulary",
        ),
        Patch("megatron.training.arguments._print_args", lambda *_: None, "prints 700 lines ahead of what was found"),
        *(
            wrapping(f"{module}.pretrain", _rehearse, "trains instead of rehearsing")
            for module in ("megatron.training.training", "megatron.training")
        ),
    )


def _parse_for_the_real_device(parse_args: Callable, *args: Any, **kwargs: Any) -> Namespace:
    """The launch is for GPUs unless `--device cpu` is given; it is not traced."""
    namespace = parse_args(*args, **kwargs)
    if getattr(namespace, "device", None) == "auto":  # Megatron also parses for itself, without our flags
        namespace.device = "cuda"
    namespace.pipeline_trace = None
    return namespace


def _build_empty_tokenizer(build_tokenizer: Callable, args: Namespace) -> Any:
    """Megatron's empty tokenizer in place of the launch's: a rehearsal needs the size of its vocabulary only."""
    kind, given, size = args.tokenizer_type, args.vocab_size, _vocabulary_size(args)
    if size is not None:
        args.tokenizer_type, args.vocab_size = "NullTokenizer", size
    try:
        return build_tokenizer(args)
    except Exception as error:
        raise SystemExit(
            f"error: a rehearsal needs the size of the vocabulary, and --tokenizer-type {kind} cannot be loaded "
            f"here ({' '.join(str(error).split())[:200]}); give --vocab-size."
        ) from None
    finally:
        args.tokenizer_type, args.vocab_size = kind, given


def _vocabulary_size(args: Namespace) -> int | None:
    """The number of words according to the flags; None if only the tokenizer has it."""
    if args.vocab_size or args.tokenizer_type != "GPT2BPETokenizer":
        return args.vocab_size
    if args.vocab_file and Path(args.vocab_file).is_file():
        return len(json.loads(Path(args.vocab_file).read_text(encoding="utf-8")))
    return _GPT2_WORDS


def _rehearse(pretrain: Callable, *args: Any, **kwargs: Any) -> None:
    """Rehearse the launch instead of Megatron's `pretrain`, print what was found and end the program."""
    from megatron.training import get_args

    from ..planning.costs.machine import GIB
    from .fakes import check, launch_in_words, stood_for
    from .report import RehearsalReport
    from .stage import Stage

    launch = get_args()
    check(launch)
    vars(launch).update(_INSTEAD)
    stages = run_stages(
        lambda: Stage(launch).run(partial(pretrain, *args, **kwargs)), launch, _ranks_of_first_pipeline(launch)
    )
    report = RehearsalReport(launch_in_words(launch), int(launch.device_memory * GIB), stages, stood_for(launch))
    print(report.as_text(), flush=True)
    if launch.dry_run_output is not None:
        _write(report.as_json(), launch.dry_run_output)
    for problem in report.problems:
        print(f"error: {problem}.", file=sys.stderr)
    raise SystemExit(1 if report.problems else 0)


def run_stages(run_stage: Callable[[], Any], args: Namespace, ranks: Sequence[int]) -> list[Any]:
    """The reports of the stages, in the order of `ranks`, their global ranks; ends the program as soon as one fails.

    `run_stage` runs the stage of `args.rank`. Each stage has a fork of this process, which has imported and parsed
    everything already.
    """
    context = multiprocessing.get_context("fork")
    num_at_once = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting, running, reports = list(ranks), {}, {}
    with tqdm(total=len(ranks), desc="Rehearsing pipeline stages", disable=None, leave=False) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < num_at_once:
                    rank = waiting.pop(0)
                    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, it is closed with its process
                    result, end = context.Pipe(duplex=False)
                    process = context.Process(target=_run, args=(run_stage, args, rank, end, log), daemon=True)
                    process.start()
                    end.close()
                    running[result] = rank, process, log
                for result in wait(list(running), timeout=1):
                    rank, process, log = running[result]
                    try:
                        reports[rank] = result.recv()
                    except EOFError:
                        process.join()
                        raise SystemExit(_failure(rank, process.exitcode, log)) from None
                    del running[result]
                    bar.update()
                bar.refresh()
        finally:
            for _, process, _ in running.values():
                process.kill()
    return [reports[rank] for rank in ranks]


def _failure(rank: int, exit_code: int, log: IO[str]) -> int | str:
    """Print the end of a stage's log, which has its error; returns its exit code, or a sentence if it was killed."""
    log.seek(0)
    sys.stderr.write(log.read()[-_LONGEST:])
    return exit_code if exit_code > 0 else f"error: the process of rank {rank} was ended by signal {-exit_code}."


def _run(run_stage: Callable[[], Any], args: Namespace, rank: int, end: Connection, log: IO[str]) -> None:
    """Run one stage in its process: send its report to `end`, print to `log`, and end with the program."""
    end_with_parent()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ["RANK"] = str(rank)
    args.rank = rank
    try:
        end.send(run_stage())
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _ranks_of_first_pipeline(args: Namespace) -> range:
    """The global ranks of one pipeline, from its first stage to its last."""
    stages, ranks_of_stage = (
        args.pipeline_model_parallel_size,
        args.tensor_model_parallel_size * args.context_parallel_size,
    )
    apart = ranks_of_stage if args.use_tp_pp_dp_mapping else args.world_size // stages
    return range(0, apart * stages, apart)


def _write(report: Mapping[str, Any], directory: Path) -> None:
    """Write `rehearsal.json`, and `memory.png` if there is matplotlib."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rehearsal.json").write_text(json.dumps(report) + "\n")
    if find_spec("matplotlib") is None:
        print(f"No picture in {directory}: matplotlib is not installed.")
    else:
        plot_memory(report, directory / "memory.png")
