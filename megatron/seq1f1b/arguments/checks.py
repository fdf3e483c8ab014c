"""Checks of mistakes in flags that neither Megatron nor a library notices before they cost work.

Tested in functional_tests/test_bad_input.py by test_one_sentence.
"""

import math
import os
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_late_mistakes(args: Namespace) -> None:
    """Raise ValueError for mistakes in flags that would show late, or never."""
    for name, value in vars(args).items():
        if isinstance(value, float) and math.isnan(value):  # Megatron would train on NaN losses
            raise ValueError(f"--{name.replace('_', '-')} nan must be a number")
    given = vars(args).get
    if given("ckpt_step") is not None and not given("load") and not given("pretrained_checkpoint"):
        raise ValueError(f"--ckpt-step {given('ckpt_step')} needs --load")  # Megatron would start anew
    if os.path.isfile(given("load") or ""):  # Megatron would train from random weights
        raise ValueError(f"--load {given('load')} is a file; give the folder that --save named")
    if given("position_embedding_type") == "rope" and given("rotary_percent") == 0:  # it would train without positions
        raise ValueError("--rotary-percent 0.0 must be above 0")
    for end in ("first", "last"):  # Megatron would train a model of another depth
        layers = given(f"decoder_{end}_pipeline_num_layers")
        if layers and layers > args.num_layers:
            flag = f"--decoder-{end}-pipeline-num-layers"
            raise ValueError(f"{flag} {layers} must be at most --num-layers {args.num_layers}")
    if args.pipeline_trace is not None:
        first = min(args.pipeline_trace_iterations)
        ends = {"--train-iters": args.train_iters}
        if not args.load:  # else the iteration from which the interval counts is not known yet
            ends["--exit-interval"] = args.exit_interval
        for flag, last in ends.items():
            if last and first > last:
                raise ValueError(f"--pipeline-trace-iterations {first} is beyond {flag} {last}; choose earlier ones")
    if args.dry_run_output is not None and not args.dry_run:
        raise ValueError("--dry-run-output needs --dry-run")
    written = {"--dry-run-output": args.dry_run_output}
    if not args.dry_run and os.environ.get("LOCAL_RANK", "0") == "0":
        # Megatron fails at the first save only; a trace is written after the third step.
        written |= {"--save": given("save"), "--pipeline-trace": args.pipeline_trace}
    _require_writable(written)


def _require_writable(folders: Mapping[str, Any]) -> None:
    """Raise ValueError for a folder, by the flag that names it, into which nothing can be written."""
    for flag, path in folders.items():
        if path is None or "://" in str(path):
            continue
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"\0")
                file.flush()
        except OSError as error:
            raise ValueError(f"{flag} {path} cannot be written ({error.strerror}); give another folder") from None
