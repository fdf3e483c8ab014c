"""Makes Megatron's `get_forward_backward_func` return our schedule in this process, if our flags select one."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import cpu, rehearsal
from .arguments import PipelineConfig, add_arguments, parse_options, run_of_arguments
from .arguments import pipeline_config as make_config
from .arguments.checks import check
from .arguments.net import Net
from .planning.run_costs import RunCosts
from .planning.summary import advice, copies_summary, summary
from .process.patches import Patch, patched, rebound, wrapping
from .process.ranks import is_rank_0, start_process, warn_on_rank_0

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

# Versions of megatron-core that were seen to train.
TESTED = ("0.19.0", "0.19.1", "0.19.2")


def install(add_flags: bool = False, keep_documents_apart: bool = False, **flags: Any) -> None:
    """Make Megatron in this process run our schedules; best called before a program imports Megatron. A second call
    does nothing. Raises ValueError for unknown keywords, or others than before, and ImportError for an old Megatron.

    A script with Megatron's arguments adds our flags to its parser and calls `validate`. With `add_flags` this happens
    in every script that has Megatron parse its arguments and calls `pretrain`. With `--dry-run` it rehearses.

    A program without megatron.training passes our `flags` as keywords: `install(sequence_splits=4)`. Megatron's
    `get_forward_backward_func` then returns our schedule (1f1b if none is named); its first step raises ValueError for
    what is unsupported. With `pipeline_placement="v"` rank r of P holds the stages r and 2P-1-r as its chunks. With
    `keep_documents_apart` no token sees another document of its sequence (docs/library.md).

    Without a GPU, or with `--device cpu`, Megatron moves to the CPU.
    """
    keywords = flags | ({"keep_documents_apart": True} if keep_documents_apart else {})
    if (before := _installed()) is not None:
        if keywords not in ({}, before.keywords):
            raise ValueError("install was called before with other keywords; call it once, or uninstall in between")
        return
    options = parse_options(flags) if keywords else None
    is_rehearsal = options is None and "--dry-run" in sys.argv[1:]
    net, patches = Net(), ExitStack()
    if options is None:
        hook = Patch("sys.excepthook", net.caught, "prints a traceback on every rank that fails")
        patches.enter_context(patched([hook]))
        if is_rehearsal:
            rehearsal.prepare(os.environ)
        else:
            net.connect()
    if is_rehearsal or cpu.wanted(sys.argv[1:] if options is None else ["--device", options.device]):
        _silence_imports()
        cpu.activate()
    from megatron.core import package_info
    from megatron.core.pipeline_parallel import schedules

    version = package_info.__version__.split("+")[0]  # without a commit, which is that of the repository around it
    check_version(version)
    upstream = schedules.get_forward_backward_func
    overlay = Overlay(upstream, patches, keywords)
    rows = _patches_of_megatron(_numbers(version))
    if options is None:
        rows += overlay.patches_of_scripts(net, add_flags)
    else:
        rows += overlay.patches_of_programs(options, keep_documents_apart)
    patches.enter_context(patched(rows))
    patches.enter_context(rebound(upstream, overlay.get_forward_backward_func))
    if is_rehearsal:
        patches.enter_context(patched(rehearsal.patches()))


def check_version(version: str) -> None:
    """Raise ImportError for a Megatron without the names that we need; warn of an untested one."""
    tested = f"tested with {', '.join(TESTED)}"
    if _numbers(version) < (0, 19):
        raise ImportError(f"megatron.seq1f1b needs megatron-core 0.19 and found {version}; it is {tested}")
    if version not in TESTED:
        warn_on_rank_0(f"megatron-core {version} was never tried with megatron.seq1f1b, which is {tested}")


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _silence_imports() -> None:
    """Suppress warnings about packages for GPUs."""
    warnings.filterwarnings("ignore", r".*(Apex|transformer-engine)", UserWarning, r"megatron\.(core|training)")
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
    warnings.filterwarnings("ignore", "'pin_memory' argument", UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def uninstall() -> None:
    """Undo `install`; without it, do nothing. If Megatron runs on the CPU, it stays there."""
    if (overlay := _installed()) is not None:
        overlay.patches.close()


def validate(args: Namespace) -> PipelineConfig:
    """The configuration of the parsed arguments, Megatron's and ours; raises ValueError for what is unsupported."""
    costs = RunCosts(args, run_of_arguments(args))
    config = _configured(costs)
    check(args)
    vars(args).update(config.in_force())
    if config.schedule is not None and is_rank_0() and not args.dry_run:
        from .runtime.from_config import attention_kernel

        print(summary(config, costs, attention_kernel(config)), flush=True)
    if (overlay := _installed()) is not None:
        overlay.use(config)
    return config


def _configured(costs: RunCosts) -> PipelineConfig:
    """The configuration of our parsed flags; rank 0 logs what the user may not expect of it."""
    config = make_config(costs.flags, costs.run, costs)
    for sentence in advice(config, costs):
        warn_on_rank_0(f"{sentence}.")
    return config


def pipeline_config() -> PipelineConfig:
    """The configuration of this process, as `validate` returned it. To be called after `install`."""
    return _installed().pipeline_config()


# `model` and `runtime` import Megatron, so they are imported only after `install`.


def use_segment_attention(model: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Give the local self-attention layers of the model chunks our attention; one of Megatron's `pre_wrap_hooks`."""
    from .model import use_segment_attention

    return use_segment_attention(model)


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, gathered: bool = False
) -> torch.Tensor:
    """The log-probabilities [b, s] of `tokens` [b, s] by logits [b, s, V/t] over a temperature, in fp32 or more, with a
    gradient. Logits of more than 2 GiB that a model returns under our schedules are never whole in it.

    The vocabulary is divided among Megatron's tensor-parallel ranks, unless the logits are `gathered`. A token outside
    of it, such as -100, gets 0. Raises ValueError for tokens of another shape.
    """
    from .model import token_log_probs

    return token_log_probs(logits, tokens, temperature, gathered)


def token_log_probs_and_entropy(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, gathered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `token_log_probs` returns, and the entropy [b, s] of the distribution at each place, in nats."""
    from .model import token_log_probs_and_entropy

    return token_log_probs_and_entropy(logits, tokens, temperature, gathered)


def whole_weights(model: Iterable[torch.nn.Module]) -> AbstractContextManager[None]:
    """The weights of these model chunks whole, to read or write them between steps with `partition_state`; collective
    over the ranks of a pipeline stage."""
    from .runtime.partitioned_state import whole

    return whole(model)


def local_hybrid_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's own layers for its hybrid model, which upstream builds with Transformer Engine only:
    `config.hybrid_stack_spec = local_hybrid_spec(config.transformer)`."""
    from .model import local_hybrid_spec

    return local_hybrid_spec(config)


class Overlay:
    """Replaces Megatron's choice of a schedule by ours, with one configuration and one executor; `keywords` are those
    of `install`."""

    def __init__(self, upstream: Callable, patches: ExitStack, keywords: Mapping[str, Any] | None = None) -> None:
        self._upstream, self.patches, self.keywords = upstream, patches, keywords or {}
        self._runs_own_script = True  # which calls `validate` itself
        self.config: PipelineConfig | None = None
        self.executor: Callable | None = None

    def patches_of_programs(self, options: Namespace, keep_documents_apart: bool) -> list[Patch]:
        """The patches for a program without Megatron's arguments, which has an executor at once."""
        from .runtime import partitioned_state
        from .runtime.from_config import ProgramExecutor

        if options.pipeline_schedule is None and options.pipeline_schedule_file is None:
            options.pipeline_schedule = "1f1b"
        self.executor = ProgramExecutor(lambda run: _configured(RunCosts(options, run)), keep_documents_apart)
        return list(partitioned_state.patches()) if options.partition_state else []

    def patches_of_scripts(self, net: Net, add_flags: bool) -> list[Patch]:
        """The patches for a script with Megatron's arguments, with `add_flags` for one without our flags."""
        from .runtime.training_loop import TrainingLoop

        def parse(upstream: Callable, own_flags: Callable | None = None, *args: Any, **more: Any) -> Namespace:
            def with_our_flags(parser: ArgumentParser) -> ArgumentParser:
                parser = own_flags(parser) if own_flags else parser
                return parser if "--sequence-splits" in parser._option_string_actions else add_arguments(parser)

            return net.parsed(upstream(with_our_flags if add_flags else own_flags, *args, **more))

        rows = [wrapping("megatron.training.arguments.parse_args", parse, "does not compare the flags of ranks")]
        if add_flags:
            names = "megatron.training.training.pretrain", "megatron.training.pretrain"
            rows += [wrapping(name, self.pretrain, "does not validate our flags") for name in names]
        return [*rows, *TrainingLoop(_megatron_args, lambda: self.executor).patches()]

    def use(self, config: PipelineConfig) -> None:
        """Take the configuration of validated arguments, before Megatron builds its process groups and its model."""
        from .runtime import partitioned_state, v_chunks
        from .runtime.from_config import sequences_of

        def communicators_of_segments(initialize: Callable[[], None]) -> None:
            with sequences_of(_megatron_args(), 0, config.lengths[0]):  # all are equally long
                initialize()

        self.config = config
        rows: list[Patch] = []
        if config.schedule is not None and config.schedule.placement == "v":
            rows += v_chunks.patches()
        if config.flags.partition_state:
            rows += partitioned_state.patches() + partitioned_state.patches_of_training_loop()
        if config.num_segments > 1 and config.run.settings.get("tp_comm_overlap"):
            name = "megatron.training.initialize._initialize_tp_communicators"
            rows.append(wrapping(name, communicators_of_segments, "makes buffers for whole sequences"))
        self.patches.enter_context(patched(rows))

    def get_forward_backward_func(self, *args: Any, **kwargs: Any) -> Callable:
        """Our executor if a schedule flag was given, Megatron's own function otherwise."""
        if self.executor is not None:
            return self.executor
        from megatron.training import get_tokenizer

        from .runtime.from_config import traced, training_executor

        config, parsed = self.pipeline_config(), _megatron_args()
        trace = partial(traced, config=config, iteration_now=lambda: parsed.curr_iteration + 1)
        if config.schedule is None:
            return trace(self._upstream(*args, **kwargs))
        # Megatron's scripts divide documents among context-parallel ranks, but for inter-document masking.
        divides_documents = not (self._runs_own_script or parsed.dataloader_inter_document_masking)
        executor = training_executor(config, parsed, lambda: get_tokenizer().eod, divides_documents)
        if (config.offloads or config.schedule.has_moves) and not parsed.dry_run:
            rate = executor.host_rate()
            if is_rank_0():
                print(copies_summary(config, RunCosts(parsed, config.run), rate), flush=True)
        self.executor = trace(executor)
        return self.executor

    def pipeline_config(self) -> PipelineConfig:
        """The configuration of Megatron's arguments; raises ValueError where no script has validated them."""
        if self.config is None:
            raise ValueError("the script must call megatron.seq1f1b.validate with its parsed arguments before pretrain")
        return self.config

    def pretrain(self, pretrain: Callable, cfg_container: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron's `pretrain` for a script that calls neither `validate` nor `use_segment_attention`."""
        parsed = _megatron_args()
        self._runs_own_script = self.config is not None
        config = self.config or validate(parsed)
        if config.schedule is not None:
            if parsed.context_parallel_size > 1 and parsed.create_attention_mask_in_dataloader:
                raise ValueError(
                    "--context-parallel-size above 1 divides attention masks among ranks, which our schedules do "
                    "without; add --no-create-attention-mask-in-dataloader"
                )
            if config.wants_segment_attention and cfg_container.model is not None:
                cfg_container.model.pre_wrap_hooks.append(use_segment_attention)
        return pretrain(cfg_container, *args, **kwargs)


def _installed() -> Overlay | None:
    """The overlay that `install` has bound, or None."""
    schedules = sys.modules.get("megatron.core.pipeline_parallel.schedules")
    overlay = getattr(getattr(schedules, "get_forward_backward_func", None), "__self__", None)
    return overlay if isinstance(overlay, Overlay) else None


def _megatron_args() -> Namespace:
    from megatron.training import get_args

    return get_args()


def _patches_of_megatron(version: tuple[int, ...]) -> list[Patch]:
    from .model import without_te
    from .runtime import optimizer_state

    def compile_unless_shipped(compile_helpers: Callable[[], None]) -> None:
        if find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    def queue(get_queue: Callable[[str], Any], mp_mode: str | None = None) -> Any:
        # A spawned Python imports Megatron and the script again, but with CUDA a fork is not safe.
        return get_queue(mp_mode or ("fork" if cpu.is_active() else "spawn"))

    writing = "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue"
    name, reason = "megatron.core.datasets.utils.compile_helpers", "fails in a wheel, which ships them compiled"
    rows = [wrapping(name, compile_unless_shipped, reason)]
    rows.append(wrapping(writing, queue, "starts a new Python, which imports all again, on the CPU, too"))
    starting = "multiprocessing.process.BaseProcess.start"
    rows.append(wrapping(starting, start_process, "starts processes that outlive a killed rank"))
    rows += optimizer_state.repairs(version)
    return rows if cpu.is_active() else [*rows, *without_te.repairs()]  # the CPU's patches include the repairs
