"""The choices that a launch leaves to a planner, by the table of features that training checks at start-up.

Tested in commands/test_launch_flags.py.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

from ..arguments.unsupported import OurFeature, first_unsupported, setting_of
from ..planner.space import Candidate
from .launch_flags import decided_flags
from .model_flags import read_model

# Settings of plans in units: their own flag, and one that their user is told to add.
_OF_UNITS = {"calculate_per_token_loss": True, "keep_documents_apart": True}
_OF_MEGATRON = frozenset({OurFeature.EVERY_RUN, OurFeature.MEGATRONS_OWN})
# Features that a planner may use.
_OPTIONAL = (OurFeature.SEGMENTS, OurFeature.SPLIT_BACKWARDS, OurFeature.OFFLOAD, OurFeature.PARTITIONED_STATE)
# What every plan decides, at the sizes at which most goes together.
_LEAST = MappingProxyType(
    {
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "use_distributed_optimizer": True,
    }
)
# What a plan decides and no row of the table depends on, as plans use it: fewer settings to tell apart.
_OF_NO_ROW = frozenset(
    {
        "seq_length",
        "global_batch_size",
        "recompute_method",
        "recompute_num_layers",
        "sequence_splits",
        "sequence_split_strategy",
        "activation_offload_fraction",
    }
)


class LaunchRules:
    """The flags of a launch, one an item, each with its values, as limits of its plans, which always use the features
    `always`. Raises ValueError, with the sentence of training, for flags that do not go with these."""

    def __init__(self, flags: Sequence[str], always: Collection[OurFeature] = ()) -> None:
        self._settings = _settings_of(flags)
        if OurFeature.UNITS in always:
            self._settings |= _OF_UNITS
        self._always = frozenset({OurFeature.EVERY_RUN, OurFeature.ANY_SCHEDULE, *always})
        self._starts = cache(self._would_start)
        sentence = self._refusal(self._always)
        if sentence is not None:
            raise ValueError(sentence)

    def accept(self, candidate: Candidate) -> bool:
        """Whether training would start with these flags and those of the plan, under our schedules."""
        setup = candidate.setup
        uses = set(self._always)
        if len(setup.segments) > 1:
            uses.add(OurFeature.SEGMENTS)
        if setup.splits_backward and setup.family != "auto":  # which splits none where that is refused
            uses.add(OurFeature.SPLIT_BACKWARDS)
        if setup.offloads > 0:
            uses.add(OurFeature.OFFLOAD)
        if setup.partitions_state:
            uses.add(OurFeature.PARTITIONED_STATE)
        return self._starts(frozenset(uses), _decided(candidate))

    def accept_of_megatron(self, candidate: Candidate) -> bool:
        """Whether training would start with these flags and those of the plan, under Megatron's own schedules."""
        return self._starts(_OF_MEGATRON, _decided(candidate, by_megatron=True))

    def left_out(self) -> Iterator[str]:
        """A sentence for each feature that no plan may use."""
        for use in _OPTIONAL:
            sentence = self._refusal(self._always | {use})
            if sentence is not None:
                yield f"Plans {use.value.replace('`', '')} are left out: {sentence}."
        sentence = self._refusal(self._always, {"pipeline_model_parallel_size": 2})
        if sentence is not None:
            yield f"Plans with several pipeline ranks are left out: {sentence}."

    def _would_start(self, uses: frozenset[OurFeature], decided: frozenset[tuple[str, Any]]) -> bool:
        return self._refusal(uses, dict(decided)) is None

    def _refusal(self, uses: frozenset[OurFeature], decided: Mapping[str, Any] = MappingProxyType({})) -> str | None:
        return first_unsupported({**self._settings, **_LEAST, **decided}, uses)


def _decided(candidate: Candidate, by_megatron: bool = False) -> frozenset[tuple[str, Any]]:
    """The settings that a plan decides."""
    values = _values_of(decided_flags(candidate, by_megatron)).items()
    return frozenset((name, value) for name, value in values if name not in _OF_NO_ROW)


def _setting(values: list[int | str]) -> Any:
    """The value of a flag as Megatron's parser gives it in most cases."""
    if not values:
        return True
    return values[0] if len(values) == 1 else tuple(values)


def _values_of(flags: Sequence[str]) -> dict[str, Any]:
    """The settings of flags, one an item, by the names of Megatron's arguments."""
    return dict(map(_name_and_value, flags))


@lru_cache(maxsize=4096)  # a search asks for the same flags again and again
def _name_and_value(flag: str) -> tuple[str, Any]:
    word, *values = shlex.split(flag)
    name, is_joined, value = word.partition("=")
    if is_joined:
        values.insert(0, value)
    return setting_of(name), _setting([int(word) if word.isdigit() else word for word in values])


def _settings_of(flags: Sequence[str]) -> dict[str, Any]:
    """Settings by the names of Megatron's arguments; the sizes of a model in their types."""
    # Unless a flag says something else.
    settings: dict[str, Any] = {"fp8_recipe": "delayed", "untie_embeddings_and_output_weights": False}
    settings |= _values_of(flags)
    sizes = vars(read_model(shlex.split(" ".join(flags))))
    return settings | sizes | {"dry_run": True}  # the packages are those of the cluster
