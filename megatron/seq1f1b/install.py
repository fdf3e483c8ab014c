"""The only file that rebinds names of Megatron: it asks for a schedule, and gets ours if our flags say so."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import cpu

if TYPE_CHECKING:  # these import Megatron, which has to wait until the CPU redirects are in place
    from .config import PipelineConfig
    from .runtime import Packing, Tracer


def install(add_flags: bool = False, always: bool = False, placement: str = "looped", **flags: Any) -> None:
    """Make Megatron in this process honour our flags; to be called before a program imports Megatron.

    A script with Megatron's arguments adds our flags to its parser and validates them. With `add_flags`, so does every
    script that parses its arguments with Megatron's `parse_and_validate_args`. Without our schedule flags Megatron's
    own functions are what runs.

    A program that uses megatron-core without megatron.training gives our flags here:
    `install(pipeline_schedule="1f1b", sequence_splits=4)`. Then Megatron's `get_forward_backward_func` returns our
    schedule (1f1b if none is named), which raises ValueError in its first step for what cannot be honoured.
    `placement="v"` says that rank r of P holds the stages r and 2P-1-r as its chunks. Raises ValueError for what is no
    flag.

    `always` is for tests: Megatron's own functions by all their names run in our interpreter, flags or none.

    On a machine without a GPU, or with `--device cpu`, also moves Megatron to the CPU. Calling it again does nothing.
    """
    is_library = bool(flags) or placement != "looped"
    options = _options(placement, flags) if is_library else None
    if cpu.wanted(["--device", options.device] if is_library else sys.argv[1:]):
        cpu.activate()
    import megatron.core.pipeline_parallel as pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    if _is_ours(schedules.get_forward_backward_func) or _is_ours(schedules.forward_backward_no_pipelining):
        return
    from .model.output_layer import allow_output_layers_without_apex

    allow_output_layers_without_apex()
    if always:
        _replace_functions(schedules)
    elif is_library:
        from .library import LibrarySchedule

        overlay = _Overlay(schedules.get_forward_backward_func, LibrarySchedule(options))
        _bind(overlay, schedules, pipeline_parallel)
    else:
        import megatron.core.datasets.utils as datasets_utils
        import megatron.training.training as training

        _bind(_Overlay(schedules.get_forward_backward_func), schedules, pipeline_parallel, training)
        datasets_utils.compile_helpers = partial(_compile_helpers_unless_shipped, datasets_utils.compile_helpers)
        if add_flags:
            from megatron.training import arguments

            arguments.parse_and_validate_args = partial(_parse_and_validate, arguments.parse_and_validate_args)


def _is_ours(function: Callable) -> bool:
    return type(getattr(function, "__self__", None)).__module__.startswith(__package__)


def _bind(overlay: _Overlay, *modules: ModuleType) -> None:
    for module in modules:
        module.get_forward_backward_func = overlay.get_forward_backward_func


def _options(placement: str, flags: Mapping[str, Any]) -> Namespace:
    from .arguments import parse_options

    options = parse_options(flags)
    options.placement = placement
    return options


def _replace_functions(schedules: ModuleType) -> None:
    """Megatron's `get_forward_backward_func` looks its functions up in its module, and so finds these."""
    from .compatibility import refusal
    from .runtime import PipelineExecutor, UpstreamFunctions, upstream_functions

    executor = PipelineExecutor("1f1b", 1, lambda length: (length,))
    names = upstream_functions.NAMES
    functions = UpstreamFunctions(
        executor,
        {name: getattr(schedules, name) for name in names},
        lambda config: refusal(config, has_segments=False, splits_backwards=False) is not None,
    )
    for name in names:
        setattr(schedules, name, getattr(functions, name))


def _parse_and_validate(
    upstream: Callable, extra_args_provider: Callable | None = None, *args: Any, **kwargs: Any
) -> Namespace:
    """Megatron's `parse_and_validate_args`, for a script that does not know of our flags."""
    from .arguments import add_arguments, has_our_flags, validate

    def with_our_flags(parser: ArgumentParser) -> ArgumentParser:
        parser = extra_args_provider(parser) if extra_args_provider else parser
        return parser if has_our_flags(parser) else add_arguments(parser)

    parsed = upstream(with_our_flags, *args, **kwargs)
    validate(parsed)
    return parsed


class _Overlay:
    """Stands between Megatron and its schedules; keeps our executor from one call to the next."""

    def __init__(self, upstream: Callable, executor: Callable | None = None) -> None:
        self._upstream = upstream
        self._executor = executor

    def get_forward_backward_func(self, *args: Any, **kwargs: Any) -> Callable:
        """Our executor if a schedule flag was given, Megatron's own function otherwise."""
        if self._executor is not None:
            return self._executor
        from megatron.training import get_args

        from .arguments import follows_documents, pipeline_config

        megatron_args = get_args()
        config = pipeline_config(megatron_args)
        if config.schedule is not None:
            packing = _packing(config) if follows_documents(megatron_args) else None
            self._executor = _executor(config, megatron_args, packing)
            return self._executor
        function = self._upstream(*args, **kwargs)
        tracer = _tracer(config, megatron_args)
        return function if tracer is None else partial(_traced, function, tracer)


def _compile_helpers_unless_shipped(upstream: Callable) -> None:
    """The wheel brings the data set helpers compiled, without the Makefile that Megatron would compile them with."""
    if find_spec("megatron.core.datasets.helpers_cpp") is None:
        upstream()


def _executor(config: PipelineConfig, megatron_args: Namespace, packing: Packing | None) -> Callable:
    from .runtime import PipelineExecutor

    return PipelineExecutor(
        schedule=config.read_schedule(),
        num_segments=config.num_segments,
        cut=cache(config.cut),  # asked for in every step
        sequence_length_is=partial(_sequence_length_is, megatron_args),
        timeout=timedelta(minutes=megatron_args.distributed_timeout_minutes),
        tracer=_tracer(config, megatron_args),
        packing=packing,
        costs=config.action_costs,
    )


def _packing(config: PipelineConfig) -> Packing:
    from megatron.training import get_tokenizer

    from .runtime import Packing

    return Packing(get_tokenizer().eod, config.cut if config.cuts_by_documents else None)


def _tracer(config: PipelineConfig, megatron_args: Namespace) -> Tracer | None:
    from .runtime import Tracer

    if config.trace_directory is None:
        return None
    return Tracer(config.trace_directory, config.trace_iterations, lambda: megatron_args.curr_iteration + 1)


@contextmanager
def _sequence_length_is(megatron_args: Namespace, length: int) -> Iterator[None]:
    """Tensor-parallel ranks without data allocate their batch by `args.seq_length`."""
    whole, megatron_args.seq_length = megatron_args.seq_length, length
    try:
        yield
    finally:
        megatron_args.seq_length = whole


def _traced(function: Callable, tracer: Tracer, *, model: Any, num_microbatches: int, **kwargs: Any) -> Any:
    """A step of Megatron's own schedule, its forwards and backwards timed."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from .runtime import UpstreamSteps, trace_collectives
    from .schedule import Placement, Shape

    run = partial(function, model=model, num_microbatches=num_microbatches, **kwargs)
    if kwargs.get("forward_only"):
        return run()
    chunks = model if isinstance(model, list) else [model]
    group = parallel_state.get_pipeline_model_parallel_group()
    placement = Placement(group.size(), len(chunks))
    device = next(chunks[0].parameters()).device
    name = "Megatron's interleaved 1F1B" if len(chunks) > 1 else "Megatron's 1F1B"
    with tracer.step(name, Shape(placement, num_microbatches), group, device) as recorder:
        if recorder is None:
            return run()
        forward_step, backward_step = schedules.forward_step, schedules.backward_step
        steps = UpstreamSteps(forward_step, backward_step, recorder, placement, group.rank())
        schedules.forward_step, schedules.backward_step = steps.forward_step, steps.backward_step
        try:
            with trace_collectives(chunks, placement.stages_of(group.rank()), recorder.collective):
                return run()
        finally:
            schedules.forward_step, schedules.backward_step = forward_step, backward_step
