"""What a rehearsal found out, as data: per stage, and as a whole against the memory of a device."""

from dataclasses import asdict, dataclass
from typing import Any

from ..planning.costs.machine import bytes_outside
from .ledger import Category, Moment, at
from .messages import Traffic, mismatches

GIB = 2**30
MIB = 2**20


def in_words(size: int) -> str:
    """Bytes in the unit in which they are easiest to read."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / 2**10:.1f} KiB"


@dataclass(frozen=True)
class StageReport:
    """What the rehearsal of one pipeline rank found out.

    `rank` is the global rank that was rehearsed, `stages` those that it holds. `num_communicators` counts the process
    groups of several ranks that it used. `seconds` are those of the rehearsal itself.
    """

    rank: int
    stages: tuple[int, ...]
    num_layers: int
    num_parameters: int
    moments: list[Moment]
    traffic: Traffic
    num_communicators: int
    num_operators: int
    seconds: float
    is_on_gpu: bool = True

    @property
    def fullest(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def outside(self) -> int:
        """Bytes of a GPU that are not counted, by formula."""
        return bytes_outside(self.num_communicators) if self.is_on_gpu else 0

    @property
    def needed(self) -> int:
        """Bytes of the device at the fullest moment."""
        return self.fullest.peak_bytes + self.outside


@dataclass(frozen=True)
class RehearsalReport:
    """All stages of one pipeline, in their order; `device_memory` in bytes, `launch` describes the launch."""

    launch: str
    device_memory: int
    stages: tuple[StageReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def fullest(self) -> StageReport:
        return max(self.stages, key=lambda stage: stage.needed)

    @property
    def too_full(self) -> list[StageReport]:
        """The stages that do not fit."""
        return [stage for stage in self.stages if stage.needed > self.device_memory]

    @property
    def mismatches(self) -> list[str]:
        """One sentence, without its full stop, for each channel whose two ends disagree."""
        return mismatches({stage.rank: stage.traffic for stage in self.stages})

    @property
    def problems(self) -> list[str]:
        """Why the launch cannot work, each in one sentence without its full stop."""
        return self.mismatches + ([self._lack_of_memory()] if self.too_full else [])

    def _lack_of_memory(self) -> str:
        limit = f"the {self.device_memory / GIB:.4g} GiB of --device-memory"
        fullest = self.fullest
        most = f"{in_words(fullest.needed)}, {at(fullest.fullest.name)}"
        numbers = [number for number, stage in enumerate(self.stages) if stage in self.too_full]
        if len(numbers) == 1:
            return f"pipeline rank {numbers[0]} needs more than {limit}: {most}"
        names = ", ".join(map(str, numbers[:-1]))
        return (
            f"pipeline ranks {names} and {numbers[-1]} need more than {limit}, rank {self.stages.index(fullest)} "
            f"most: {most}"
        )

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes."""
        return {
            "launch": self.launch,
            "device_memory": self.device_memory,
            "fits": not self.too_full,
            "problems": self.problems,
            "notes": list(self.notes),
            "pipeline_ranks": [_stage_as_json(stage) for stage in self.stages],
        }


def _stage_as_json(stage: StageReport) -> dict[str, Any]:
    data = asdict(stage)
    data["traffic"] = {
        side: [message._asdict() for message in messages] for side, messages in stage.traffic._asdict().items()
    }
    data["moments"] = [moment_as_json(moment) for moment in stage.moments]
    return data | {"fullest": moment_as_json(stage.fullest), "outside": stage.outside, "needed": stage.needed}


def moment_as_json(moment: Moment) -> dict[str, Any]:
    """Sizes in bytes, categories without any left out."""
    sizes = {category.value: moment.peak[category] for category in Category if moment.peak.get(category)}
    return {"name": moment.name, "peak": sizes, "end": moment.end}
