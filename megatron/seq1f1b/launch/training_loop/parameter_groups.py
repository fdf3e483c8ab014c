"""Parameter groups of a checkpoint whose learning rates differ from those of the run.

Megatron finds the group of a checkpoint by the largest and smallest learning rate, among others, also where flags say
which of the two is to hold.

Tested in functional_tests/test_training_features.py by test_a_run_goes_on_with_another_learning_rate.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

from ...process.patches import Patch, PatchTable, wrapping

Group = dict[str, Any]
# What the flags of a schedule set in all groups.
_SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
_OPTIMIZER = "megatron.core.optimizer"


class ParameterGroups:
    """`args()` returns the arguments of Megatron's training loop."""

    def __init__(self, args: Callable[[], Namespace]) -> None:
        self._args = args

    def patches(self) -> PatchTable:
        reason = "finds no group with another learning rate"
        return (
            wrapping(f"{_OPTIMIZER}.distrib_optimizer.DistributedOptimizer.load_state_dict", self.load, reason),
            Patch(
                f"{_OPTIMIZER}.optimizer.MegatronOptimizer._filter_and_reorder_param_groups",
                lambda old: staticmethod(partial(self.reorder, old)),
                reason,
                wraps=True,
            ),
        )

    def load(self, upstream: Callable, optimizer: Any, state: dict[str, Any]) -> None:
        if "optimizer" in state:  # not with Megatron's FSDP
            self._agree(optimizer.optimizer.param_groups, state["optimizer"]["param_groups"])
        upstream(optimizer, state)

    def reorder(self, upstream: Callable, current: list[Group], saved: list[Group]) -> list[Group]:
        self._agree(current, saved)
        return upstream(current, saved)

    def _agree(self, current: Sequence[Group], saved: Sequence[Group]) -> None:
        """Let groups have the learning rates of the run with --override-opt-param-scheduler, those of the checkpoint
        with --use-checkpoint-opt-param-scheduler. Raises ValueError without either, if they differ."""
        args = self._args()
        for of_run, of_checkpoint in _pairs(current, saved):
            for name in _SCHEDULED:
                here = of_run.get(name)
                there = of_checkpoint.get(name)
                if here == there:
                    continue
                if args.override_opt_param_scheduler:
                    _set(of_checkpoint, name, here)
                elif args.use_checkpoint_opt_param_scheduler:
                    _set(of_run, name, there)
                else:
                    flag = {"max_lr": "--lr", "min_lr": "--min-lr"}.get(name, "--weight-decay")
                    raise ValueError(
                        f"{flag} {here:g} differs from {there:g} in the checkpoint; add --override-opt-param-scheduler "
                        "to go on with the flags, or --use-checkpoint-opt-param-scheduler"
                    )


def _pairs(current: Sequence[Group], saved: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Each group of the run and its group of the checkpoint: of those alike, by their learning rates in order."""

    def kind(group: Group) -> tuple:
        names = (name for name in param_group_identifier_keys if name not in _SCHEDULED)
        return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)

    def rate(group: Group) -> float:
        return group.get("max_lr") or 0.0

    for one_kind in dict.fromkeys(map(kind, current)):
        of_run = sorted((group for group in current if kind(group) == one_kind), key=rate)
        of_checkpoint = sorted((group for group in saved if kind(group) == one_kind), key=rate)
        if len(of_run) == len(of_checkpoint):  # Megatron tells of others
            yield from zip(of_run, of_checkpoint, strict=True)


def _set(group: Group, name: str, value: Any) -> None:
    if value is None:
        del group[name]
    else:
        group[name] = value
