"""The choices that a launch leaves to a planner, by the table of features that training checks at start-up."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any

from ..arguments.supported import Use, first_unsupported, setting_of
from ..costs.training_setup import TrainingSetup
from ..planner.space import Candidate
from .model_flags import read_model

# Settings of plans in units: their own flag, and one that their user is told to add.
_OF_UNITS = {"calculate_per_token_loss": True, "keep_documents_apart": True}
_OF_MEGATRON = frozenset({Use.EVERY_RUN, Use.MEGATRONS_OWN})
# Features that a planner may use.
_OPTIONAL = (Use.SEGMENTS, Use.SPLIT_BACKWARDS, Use.OFFLOAD, Use.PARTITIONED_STATE)


class LaunchRules:
    """The flags of a launch, each with its values, as limits of its plans, which always use the features `always`.
    Raises ValueError, with the sentence of training, for flags that do not go with these."""

    def __init__(self, flags: Sequence[str], always: Collection[Use] = ()) -> None:
        self._settings = _settings_of(flags) | (_OF_UNITS if Use.UNITS in always else {})
        self._always = frozenset({Use.EVERY_RUN, Use.ANY_SCHEDULE, *always})
        self._refusal = cache(self._refusal)
        if sentence := self._refusal(self._always, 1, 1, 1):
            raise ValueError(sentence)

    def accept(self, candidate: Candidate) -> bool:
        """Whether training would start with these flags and those of the plan, under our schedules."""
        setup = candidate.setup
        splits = setup.splits_backward and setup.family != "auto"  # which splits none where that is refused
        taken = len(setup.segments) > 1, splits, setup.offloads > 0, setup.partitions_state
        return self._starts(setup, self._always.union(compress(_OPTIONAL, taken)))

    def accept_of_megatron(self, candidate: Candidate) -> bool:
        """The same under Megatron's own schedules."""
        return self._starts(candidate.setup, _OF_MEGATRON)

    def left_out(self) -> Iterator[str]:
        """A sentence for each feature that no plan may use."""
        for use in _OPTIONAL:
            if sentence := self._refusal(self._always | {use}, 1, 1, 1):
                yield f"Plans {use.value.replace('`', '')} are left out: {sentence}."
        if sentence := self._refusal(self._always, 1, 1, 2):
            yield f"Plans with several pipeline ranks are left out: {sentence}."

    def _starts(self, setup: TrainingSetup, uses: frozenset[Use]) -> bool:
        return self._refusal(uses, setup.context_parallel, setup.expert_parallel, setup.pipeline_parallel) is None

    def _refusal(self, uses: frozenset[Use], context: int, expert: int, pipeline: int) -> str | None:
        decided: dict[str, Any] = {
            "context_parallel_size": context,
            "expert_model_parallel_size": expert,
            "pipeline_model_parallel_size": pipeline,
            "cp_comm_type": "all_gather",
            "partition_state": Use.MEGATRONS_OWN not in uses,
            "use_distributed_optimizer": True,
        }
        return first_unsupported(self._settings | decided, uses)


def _setting(values: list[int | str]) -> Any:
    """What Megatron's parser makes of the values of a flag, in most cases."""
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _settings_of(flags: Sequence[str]) -> Mapping[str, Any]:
    """Settings by the names of Megatron's arguments; the sizes of a model in their types."""
    # Unless a flag says something else.
    settings: dict[str, Any] = {"fp8_recipe": "delayed", "untie_embeddings_and_output_weights": False}
    for flag in flags:
        word, *values = shlex.split(flag)
        name, is_joined, value = word.partition("=")
        if is_joined:
            values.insert(0, value)
        settings[setting_of(name)] = _setting([int(each) if each.isdigit() else each for each in values])
    sizes = vars(read_model(shlex.split(" ".join(flags))))
    return settings | sizes | {"dry_run": True}  # the packages are those of the cluster
