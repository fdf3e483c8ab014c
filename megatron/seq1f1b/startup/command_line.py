"""Megatron's parsing of the command line with our checks in between.

The table of what is unsupported is looked at before Megatron's own checks, whose assertions would otherwise end the
program first; the rest before Megatron prints its arguments, several hundred lines that would bury a sentence.
"""

import argparse
import copy
import difflib
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from ..arguments import PipelineConfig, pipeline_config, refuse_unsupported, run_of_arguments
from ..patches import Patch
from ..planning.model_sizes import model_shape
from ..planning.run_costs import RunCosts
from .blends import check_split, data_prefixes
from .checkpoint import check_checkpoint
from .data_files import check_data, check_token_ids
from .ending import end
from .explaining import explained
from .places import Place, check_space, check_writable, checkpoint_bytes, num_checkpoints, num_parameters, places
from .tokenizer import check_tokenizer
from .values import unusable_value

# For checks only, where the vocabulary is not known before the tokenizer is loaded.
_USUAL_VOCABULARY = 32768


class CommandLine:
    """The steps from the command line to checked arguments, around Megatron's own; it keeps the parser in between."""

    def __init__(self) -> None:
        self._parser: ArgumentParser | None = None

    def patches(self) -> tuple[Patch, ...]:
        """What puts these steps into `megatron.training.arguments`."""
        module = "megatron.training"
        steps = (
            (
                "arguments.parse_args",
                self.parse_args,
                "our refusals come first, and mistyped flags do not print the usage",
            ),
            (
                "arguments.validate_args",
                self.validate_args,
                "an assertion of Megatron's becomes a sentence with its flags",
            ),
            (
                "arguments._print_args",
                self.print_args,
                "what we check is checked before several hundred lines are printed",
            ),
            (
                "arguments.set_global_variables",
                self.set_global_variables,
                "a tokenizer that does not fit the data is a sentence",
            ),
            ("global_vars.build_tokenizer", build_tokenizer, "a tokenizer that does not load is a sentence"),
        )
        return tuple(Patch(f"{module}.{name}", partial(partial, step), why, wraps=True) for name, step, why in steps)

    def parse_args(
        self, upstream: Callable, extra_args_provider: Callable | None = None, *rest: Any, **more: Any
    ) -> Namespace:
        """Parse, and look at numbers and at the table of what is unsupported."""
        megatrons: list[argparse.Action] = []

        def provider(parser: ArgumentParser) -> ArgumentParser:
            megatrons.extend(parser._actions)
            self._parser = extra_args_provider(parser) if extra_args_provider else parser
            self._parser.error = partial(_mistyped, self._parser)
            return self._parser

        with explained("Megatron cannot read these flags", None, Namespace()):
            args = upstream(provider, *rest, **more)
        message = unusable_value(args, megatrons)
        if message is not None:
            end(message)
        if hasattr(args, "pipeline_schedule"):  # a script may parse its arguments without our flags
            try:
                refuse_unsupported(args, vars(args))
            except ValueError as error:
                end(str(error), error)
        return args

    def validate_args(self, upstream: Callable, args: Namespace, *rest: Any, **more: Any) -> Any:
        """Megatron's own checks."""
        with explained("Megatron does not take these flags", self._parser, args):
            return upstream(args, *rest, **more)

    def print_args(self, upstream: Callable, title: str, args: Namespace) -> None:
        """All that can be checked before a tokenizer is loaded and processes meet."""
        try:
            config = check(args)
        except ValueError as error:
            end(str(error), error)
        if config is not None:
            args = copy.copy(args)  # what was asked for is looked at again, when the vocabulary is known
            vars(args).update(config.in_force())
        upstream(title, args)

    def set_global_variables(self, upstream: Callable, args: Namespace, *rest: Any, **more: Any) -> None:
        """Megatron loads the tokenizer here, and only then is the size of the vocabulary known."""
        with explained("Megatron does not take these flags", None, args):
            upstream(args, *rest, **more)
        try:
            check_vocabulary(args)
        except ValueError as error:
            end(str(error), error)


def build_tokenizer(upstream: Callable, args: Namespace) -> Any:
    """Megatron's loading of a tokenizer, which fails in as many ways as there are libraries."""
    what = f"the tokenizer cannot be loaded (--tokenizer-type {args.tokenizer_type}"
    model = f" --tokenizer-model {args.tokenizer_model})" if args.tokenizer_model else ")"
    with explained(what + model, None, args):
        return upstream(args)


def check_vocabulary(args: Namespace) -> None:
    """Raise ValueError for data of a larger vocabulary; to be called when the tokenizer is loaded."""
    if args.padded_vocab_size is None or getattr(args, "dry_run", False) or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for flag, prefix in data_prefixes(args):
        check_token_ids(flag, prefix, args.padded_vocab_size)


def check(args: Namespace) -> PipelineConfig | None:
    """The configuration of our flags; None if a script has none.

    Raises ValueError for flags that do not fit, places that cannot be written, and files that cannot be read.
    """
    probe = copy.copy(args)
    if probe.padded_vocab_size is None:
        probe.padded_vocab_size = args.vocab_size or _USUAL_VOCABULARY
    run = run_of_arguments(probe)
    config = None
    if hasattr(args, "pipeline_schedule"):  # a script may parse its arguments without our flags
        config = pipeline_config(probe, run, RunCosts(probe, run))
        _check_traced_iterations(args)
        _check_rehearsal(args)
    check_split(args)
    if getattr(args, "dry_run", False):  # the machine that rehearses has no files of the cluster
        return config
    check_tokenizer(args)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank == 0:
        for flag, prefix in data_prefixes(args):
            check_data(flag, prefix)
    if args.load and args.rank == 0:
        check_checkpoint(args)
    for place in places(args, args.rank, local_rank, args.world_size):
        check_writable(place)
        if place.flag == "--save" and run.has_sizes:
            check_space(place, checkpoint_bytes(args, num_parameters(model_shape(run.settings))), num_checkpoints(args))
    return config


def _check_traced_iterations(args: Namespace) -> None:
    iterations = args.pipeline_trace_iterations
    if args.pipeline_trace is None:
        return
    if min(iterations) < 1:
        raise ValueError(f"--pipeline-trace-iterations {min(iterations)}: iterations are counted from 1")
    ends = {"--train-iters": args.train_iters}
    if not args.load:  # where a run starts that goes on from a checkpoint is not known yet
        ends["--exit-interval"] = args.exit_interval
    for flag, last in ends.items():
        if last and min(iterations) > last:
            raise ValueError(
                f"--pipeline-trace-iterations {min(iterations)} is beyond {flag} {last}; choose earlier ones"
            )


def _check_rehearsal(args: Namespace) -> None:
    if args.dry_run_output is None:
        return
    if not args.dry_run:
        raise ValueError("--dry-run-output needs --dry-run")
    check_writable(Place("--dry-run-output", args.dry_run_output))


def _mistyped(parser: ArgumentParser, message: str) -> NoReturn:
    """In place of `ArgumentParser.error`, which prints the usage, several hundred lines, on every rank."""
    unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
    known = difflib.get_close_matches(unknown, parser._option_string_actions, n=1) if unknown else []
    hint = f"did you mean {known[0]}?" if known else "--help lists the flags"
    end(f"{message}; {hint}" if not hint.endswith("?") else f"{message} ({hint})")
