"""What Megatron logs of experts, on pipeline ranks that have none.

Megatron sums these metrics over a pipeline, and then over the ranks that share its tokens. A rank without experts
guesses how long they are, wrongly in hybrid models, so that the first step never ends. It leaves out the second sum: if
it is the last rank, which prints them, they are those of a part of the tokens. Metrics that no rank has recorded in the
first step are made by Megatron at its end, on all ranks alike, so that ranks ask one another in two steps at most.

Tested in functional_tests/test_seq1f1b_training.py by test_what_is_logged_of_experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

# The groups over which Megatron's routers sum or average, as they are named in its collections of groups.
_KINDS = ("tp_cp", "tp_dp_cp")


@dataclass(frozen=True)
class _Form:
    """The number of layers of a metric; the kinds of the groups that sum and average it, None for no group."""

    num_layers: int
    summed_over: str | None
    averaged_over: str | None
    is_averaged_over_replicas: bool


class ExpertMetrics:
    """Remembers which metrics the ranks of the pipeline have in one form."""

    def __init__(self) -> None:
        self._agreed: set[str] = set()

    def complete(self, tracker: Any, names: Sequence[str], groups: ProcessGroupCollection | None = None) -> None:
        """Add to Megatron's `tracker` those of the metrics that only other ranks of the pipeline have. All of its ranks
        call this at the end of a step, with the same names."""
        missing = [name for name in names if name not in self._agreed]
        if not missing or dist.get_backend() == "fake":
            return
        if groups is None:
            groups = ProcessGroupCollection.use_mpu_process_groups(["pp", *_KINDS])
        of_kind = {kind: getattr(groups, kind, None) for kind in _KINDS}

        def kind_of(group: Any) -> str | None:
            return next((kind for kind, other in of_kind.items() if other is group), None)

        own = {
            name: _Form(
                num_layers=len(entry.values),
                summed_over=kind_of(entry.reduce_group),
                averaged_over=kind_of(entry.avg_group),
                is_averaged_over_replicas=entry.needs_dp_avg,
            )
            for name, entry in tracker.metrics.items()
            if name in missing
        }
        forms: list[dict[str, _Form]] = [{}] * groups.pp.size()
        dist.all_gather_object(forms, own, group=groups.pp)
        of_all: dict[str, _Form] = {}
        for of_rank in forms:
            of_all.update(of_rank)
        for name, form in of_all.items():
            self._agreed.add(name)
            if name not in own:
                tracker.record(
                    name,
                    torch.zeros((), device=torch.cuda.current_device()),
                    layer_number=1,
                    num_layers=form.num_layers,
                    reduce_group=of_kind.get(form.summed_over or ""),
                    avg_group=of_kind.get(form.averaged_over or ""),
                    needs_dp_avg=form.is_averaged_over_replicas,
                )
