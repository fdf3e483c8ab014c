"""The answer of `seq1f1b plan`: the best plans of this package and of Megatron's own schedules.

Tested in commands/test_plan.py by test_plans_of_both_sides_say_why_one_wins_and_are_json.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..costs.training_setup import Fsdp
from ..planner.gain import Gain
from ..planner.search import Plan
from ..rehearsal.launch import WITHOUT_A_RING


@dataclass(frozen=True)
class Answer:
    """Plans of this package, the fastest first, and the seconds that none goes below: those of the first, unless the
    search ended early; the best plan of Megatron's own schedules, None if none fits; the launch as given, None if it
    has no parallel sizes; and the gain of the fastest plan over Megatron's."""

    ours: Sequence[Plan]
    least_seconds: float
    megatron: Plan | None
    given: Plan | None
    gain: Gain

    @property
    def advised(self) -> Plan:
        """The plan to use: that of this package, unless Megatron's is as fast within the error of predictions."""
        if self.megatron is None or self.gain.is_of_segments:
            return self.ours[0]
        return self.megatron

    @property
    def other(self) -> Plan | None:
        """The best plan of the side that is not advised; None if it has none."""
        return self.ours[0] if self.advised is self.megatron else self.megatron

    @property
    def rehearsable(self) -> Plan:
        """The plan to use, or that of this package where Megatron's cannot run without a GPU, since it has Megatron's
        FSDP or a ring of context parallelism."""
        setup = self.advised.prediction.setup
        has_ring = setup.cp_comm_type is not None and setup.cp_comm_type not in WITHOUT_A_RING
        needs_gpus = setup.fsdp is not Fsdp.OFF or has_ring
        return self.ours[0] if needs_gpus else self.advised
