"""The answer of `seq1f1b plan` as JSON, for programs.

Tested in commands/test_plan.py by test_plans_of_both_sides_say_why_one_wins_and_are_json.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.writing import written_whole
from ..planner.search import Plan
from .plan_answer import Answer


def write_answer(path: Path, args: argparse.Namespace, answer: Answer, flags_of: Callable[[Plan], list[str]]) -> None:
    """Write what was asked and every plan that is shown: seconds of a step, tokens/s of all devices, GiB of the fullest
    device and of its host, its bubble ratio, and its flags. `gain` is relative, None where only one side fits.
    `least_step_seconds`, what no plan of this package goes below, is less than the first of them takes where the search
    ended early."""

    def as_json(plan: Plan) -> dict[str, Any]:
        return {
            "step_seconds": plan.seconds,
            "tokens_per_second": plan.tokens_per_second,
            "memory_gib": plan.memory_gib,
            "host_gib": plan.host_gib,
            "bubble_ratio": plan.prediction.bubble,
            "flags": flags_of(plan),
        }

    megatron = answer.megatron
    given = answer.given
    content = {
        "gpus": args.gpus,
        "machine": args.machine,
        "seq_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
        "advised": "this package" if answer.gain.is_of_segments else "megatron",
        "gain": answer.gain.value,
        "error": answer.gain.error,
        "plans": [as_json(plan) for plan in answer.ours],
        "least_step_seconds": answer.least_seconds,
        "megatron": None if megatron is None else as_json(megatron),
        "as_given": None if given is None else as_json(given),
    }
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
