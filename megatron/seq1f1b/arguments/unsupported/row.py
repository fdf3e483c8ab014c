"""The form of a row in the table of what is unsupported.

Tested in arguments/test_unsupported.py.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from ...schedule import splitting_families
from .conditions import Condition, Settings, on

_SPLITTING = ", ".join(f"`{name}`" for name in splitting_families() if name != "auto")


class OurFeature(Enum):
    """Our features that exclude some feature of Megatron."""

    EVERY_RUN = "with Megatron's own schedules, too"
    MEGATRONS_OWN = "with Megatron's own schedules"
    ANY_SCHEDULE = "with any schedule of ours"
    SEGMENTS = "with segments"
    SPLIT_BACKWARDS = f"with {_SPLITTING}, files with W"
    V_CHUNKS = "with --pipeline-placement v"
    OFFLOAD = "with --offload-activations"
    PARTITIONED_STATE = "with --partition-state"
    PAIRS = "with --overlap-moe-expert-parallel-comm and a schedule of ours"
    SEGMENTS_OF_TOKENS = "with --segment-tokens"
    UNITS = "with --unit-tokens"


class Unsupported(NamedTuple):
    """A row of the table: our feature that excludes another one, the three parts of the sentence that the user reads,
    and the condition under which that other feature is on."""

    excluded_by: OurFeature
    feature: str
    because: str
    way_out: str
    when: Condition

    @property
    def sentence(self) -> str:
        """What the user reads, without its full stop."""
        return f"{self.feature} {self.because}; {self.way_out}"

    def holds(self, settings: Settings) -> bool:
        """Whether the feature is on in these settings."""
        return self.when(settings)


def rows(
    excluded_by: OurFeature, features: Mapping[str, Condition], because: str, way_out: str
) -> tuple[Unsupported, ...]:
    """Rows of features, each with its condition, that share a reason and a way out."""
    return tuple(Unsupported(excluded_by, feature, because, way_out, when) for feature, when in features.items())


def given(*flags: str) -> dict[str, Condition]:
    """Features that are on where their flag is given."""
    return {flag: on(setting_of(flag)) for flag in flags}


def setting_of(flag: str) -> str:
    """The name of a Megatron flag among the settings of a run."""
    name = flag.removeprefix("--").replace("-", "_")
    return {
        "output_logit_dtype": "logit_dtype",
        "fp8_format": "fp8",
        "fp4_format": "fp4",
        "use_nccl_ub": "nccl_ub",
    }.get(name, name)
