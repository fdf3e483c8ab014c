"""The replacement of Megatron's choice of a schedule, and the functions of Megatron that are wrapped beside it.

Tested in functional_tests/test_library.py by test_losses_and_gradients_are_those_without_us.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arguments import PipelineConfig, add_arguments
from ..arguments.checks import check_places, check_sizes
from ..arguments.config import refuse_unsupported
from ..arguments.megatron_run import settings_of_launch
from ..costs.run_costs import RunCosts
from ..process.flag_names import flag_of
from ..process.job_variables import check_meeting_place
from ..process.net import Net
from ..process.patches import Patch, patched, wrapping
from ..process.ranks import is_rank_0
from .summary import copies_summary
from .validation import validated

if TYPE_CHECKING:
    import torch

    from ..runtime import PipelineExecutor, Surroundings, Tracer

# Of flags that all ranks must have in common.
_VALUES = (bool, int, float, str, list, tuple, Enum, type(None))


class Overlay:
    """Replaces Megatron's choice of a schedule by ours, with one configuration and one executor; `keywords` are those
    of `install`. A program without Megatron's arguments has its `executor` from the start; a script has its
    configuration once it has validated its arguments, and its executor from the first step on."""

    def __init__(
        self,
        upstream: Callable,
        patches: ExitStack,
        keywords: Mapping[str, Any] | None = None,
        executor: Callable | None = None,
    ) -> None:
        self._upstream = upstream
        self.patches = patches
        self.keywords = keywords or {}
        self._executor = executor
        self._config: PipelineConfig | None = None
        self._runs_own_script = True  # which calls `validate` itself
        self._surroundings: Surroundings | None = None  # of a rehearsal

    def patches_of_scripts(self, net: Net, add_flags: bool) -> list[Patch]:
        """The patches for a script with Megatron's arguments, with `add_flags` for one without our flags."""
        from . import training_loop

        parse = partial(_parse, net, add_flags)
        rows = [wrapping("megatron.training.arguments.parse_args", parse, "does not compare the flags of ranks")]
        if add_flags:
            names = "megatron.training.training.pretrain", "megatron.training.pretrain"
            rows += [wrapping(name, self.pretrain, "does not validate our flags") for name in names]
        return [*rows, *training_loop.patches(_megatron_args, lambda: self._executor)]

    def use(self, config: PipelineConfig) -> None:
        """Take the configuration of validated arguments, before Megatron builds its process groups and its model."""
        from ..runtime.gradients import partition_patches
        from . import v_chunks
        from .executors import sequences_of

        def communicators_of_segments(initialize: Callable[[], None]) -> None:
            with sequences_of(_megatron_args(), 0, config.lengths[0]):  # all are equally long
                initialize()

        self._config = config
        rows: list[Patch] = []
        if config.is_v:
            rows += v_chunks.patches()
        if config.flags.partition_state:
            rows += partition_patches.patches() + partition_patches.patches_of_training_loop()
        if config.num_segments > 1 and config.run.settings.get("tp_comm_overlap"):
            name = "megatron.training.initialize._initialize_tp_communicators"
            rows.append(wrapping(name, communicators_of_segments, "makes buffers for whole sequences"))
        self.patches.enter_context(patched(rows))

    def rehearse_in(self, surroundings: Surroundings) -> None:
        """Take the surroundings of a rehearsal, before Megatron builds its model."""
        self._surroundings = surroundings

    def get_forward_backward_func(self, *args: Any, **kwargs: Any) -> Callable:
        """Our executor if a schedule flag was given, Megatron's own function otherwise."""
        if self._executor is not None:
            return self._executor
        from ..runtime import watched
        from .executors import tracer_of

        config = self.pipeline_config()
        parsed = _megatron_args()
        tracer = tracer_of(config, lambda: parsed.curr_iteration + 1)
        if config.schedule is None:
            upstream = self._upstream(*args, **kwargs)
            return upstream if tracer is None else watched(upstream, tracer)
        self._executor = self._make_executor(config, parsed, tracer)
        return self._executor

    def _make_executor(self, config: PipelineConfig, parsed: Namespace, tracer: Tracer | None) -> PipelineExecutor:
        """The executor for Megatron's training loop; where activations move to the host, the link is measured."""
        from megatron.training import get_tokenizer

        from .executors import training_executor

        assert config.schedule is not None, "Megatron's own schedules need no executor"
        # Megatron's scripts divide documents among context-parallel ranks, but for inter-document masking.
        divides_documents = not (self._runs_own_script or parsed.dataloader_inter_document_masking)
        executor = training_executor(
            config=config,
            args=parsed,
            end_of_document=lambda: get_tokenizer().eod,
            divides_documents=divides_documents,
            tracer=tracer,
            surroundings=self._surroundings,
        )
        if (config.offloads or config.schedule.has_moves) and not parsed.dry_run:
            rate = executor.host_rate()
            if is_rank_0():
                print(copies_summary(config, RunCosts(parsed, config.run), rate), flush=True)
        return executor

    def pipeline_config(self) -> PipelineConfig:
        """The configuration of Megatron's arguments; raises ValueError where no script has validated them."""
        if self._config is None:
            raise ValueError("the script must call megatron.seq1f1b.validate with its parsed arguments before pretrain")
        return self._config

    def use_segment_attention(self, model: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
        """Give the local self-attention layers of the model chunks our attention."""
        from ..model import use_segment_attention

        if self._surroundings is None:
            return use_segment_attention(model)
        return use_segment_attention(model, self._surroundings.kernels_of)

    def pretrain(self, pretrain: Callable, cfg_container: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron's `pretrain` for a script that calls neither `validate` nor `use_segment_attention`."""
        parsed = _megatron_args()
        self._runs_own_script = self._config is not None
        if self._config is None:
            self.use(validated(parsed))
        config = self.pipeline_config()
        if config.schedule is not None:
            if parsed.context_parallel_size > 1 and parsed.create_attention_mask_in_dataloader:
                raise ValueError(
                    "--context-parallel-size above 1 divides attention masks among ranks, which our schedules do "
                    "without; add --no-create-attention-mask-in-dataloader"
                )
            if config.wants_segment_attention and cfg_container.model is not None:
                cfg_container.model.pre_wrap_hooks.append(self.use_segment_attention)
        return pretrain(cfg_container, *args, **kwargs)


def _parse(
    net: Net,
    add_flags: bool,
    parse_args: Callable,
    own_flags: Callable[[ArgumentParser], ArgumentParser] | None = None,
    *args: Any,
    **more: Any,
) -> Namespace:
    """Megatron's `parse_args` for a script with `own_flags`, and ours: the arguments, checked on this rank and equal on
    all ranks. Raises ValueError where they are not."""

    def with_all_flags(parser: ArgumentParser) -> ArgumentParser:
        parser = own_flags(parser) if own_flags else parser
        if add_flags and "--sequence-splits" not in parser._option_string_actions:
            parser = add_arguments(parser)
        net.learn_flags(parser)
        return parser

    from torch.distributed import is_initialized

    parsed = parse_args(with_all_flags, *args, **more)
    if hasattr(parsed, "pipeline_schedule"):  # a script may parse its arguments without our flags
        check_sizes(parsed)
        refuse_unsupported(parsed, settings_of_launch(parsed))
        if not (parsed.dry_run or parsed.fake_process_group or is_initialized()):
            check_meeting_place(os.environ)
        check_places(parsed)
    net.require_equal(_equal_on_all_ranks(parsed), timedelta(minutes=parsed.distributed_timeout_minutes))
    return parsed


# The overlay of this process. Scripts call functions, and hold no object of ours: those functions find it here.
_overlay: Overlay | None = None


def installed() -> Overlay | None:
    """The overlay that `install` has bound, or None."""
    return _overlay


def remember(overlay: Overlay | None) -> None:
    """Make it the overlay of this process; None to forget it."""
    global _overlay
    _overlay = overlay


def _megatron_args() -> Namespace:
    from megatron.training import get_args

    return get_args()


def _equal_on_all_ranks(args: Namespace) -> dict[str, str]:
    """The values that must be equal on all ranks; folders and the numbers of ranks may differ."""
    facts = {
        flag_of(name): str(value)
        for name, value in vars(args).items()
        if name not in ("rank", "local_rank") and isinstance(value, _VALUES) and os.sep not in str(value)
    }
    return facts | {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")}
