"""The kinds of questions of `seq1f1b plan`: on sequences of one length, and on unequal ones, which units hold. Each
says how its plans are found, and what is printed of them.

Tested in commands/test_plan.py by test_a_launch_is_planned_predicted_as_it_is_and_explained.
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from ..arguments.flags import AUTO
from ..planner.gain import longest_that_gains
from ..planner.launch_candidate import candidate_of_launch
from ..planner.search import MOST_ACTIONS_OF_AUTO, Plan, Search, first_that_fits, predict_candidate
from ..planner.space import Question
from ..planner.unit_search import UnitPlan, UnitSearch
from ..planner.way_out import way_out
from . import plan_text
from .parsing import name_of
from .plan_answer import Answer

# Plans that take longer than so many times the fastest are not shown beside it.
_NOT_MUCH_LONGER = 1.05

# Flags with which the documents of a pack do not attend to each other.
_SEPARATE_DOCUMENTS = ("--sft", "--dataloader-inter-document-masking", "--reset-attention-mask")


class PlanKind(ABC):
    """A kind of question, and the `search` that answers it."""

    search: Search | UnitSearch

    @property
    def question(self) -> Question:
        """The question as it is searched."""
        return self.search.question

    @abstractmethod
    def as_given(self, launch: argparse.Namespace) -> Plan | None:
        """The launch itself, predicted; None if its flags lack what that needs. Raises ValueError for wrong ones."""

    def best(self, number: int, megatron: Any) -> Sequence[Plan]:
        """The best plans of this package; `megatron` is the best of Megatron's own schedules, None if none fits. After
        a long search good plans are enough, if none gains more than the error of predictions. What takes much longer
        than the best is not looked for: schedules of very many segments take most of a minute to simulate."""
        exact_below = inf
        if megatron is not None:
            seconds = self.seconds_at_pace_of(megatron)
            exact_below = longest_that_gains(seconds, self.question.machine.error_of(self.question.model))
        return self.search.best(number, exact_below=exact_below, within=_NOT_MUCH_LONGER)

    @abstractmethod
    def seconds_at_pace_of(self, megatron: Any) -> float:
        """A step of this package with as many tokens a second as a plan of Megatron's."""

    @property
    def least_seconds(self) -> float:
        """What plans of this package take at least that the search has not found."""
        return self.search.least_seconds

    def ended_early(self, answer: Answer) -> Iterator[str]:
        """A sentence where the search has left out plans that may be faster."""
        if answer.least_seconds < answer.ours[0].seconds:
            yield plan_text.ended_early(answer.least_seconds)

    @abstractmethod
    def nothing_fits(self, left_out: Sequence[str]) -> ValueError:
        """The error for a question without a plan; the sentences `left_out` name what its flags exclude."""

    @abstractmethod
    def title(self) -> str:
        """What is asked, in a line."""

    @abstractmethod
    def row(self, plan: Any) -> Mapping[str, str]:
        """The columns of one of its plans."""

    @abstractmethod
    def verdict(self, answer: Answer) -> Iterator[str]:
        """Sentences on whether Megatron's own schedules do as well."""

    @abstractmethod
    def notes(self, flags: Sequence[str]) -> Iterator[str]:
        """Sentences on what was left out, and on what the `flags` of a plan lack."""

    def pictures(self, answer: Answer) -> Iterator[Path]:
        """Draw the pictures that are asked for; yields each file once it is written."""
        yield from ()


class PlansOfSequences(PlanKind):
    """Plans for sequences of one length; `progress` is told how many items wait, `picture` is the file of a picture.
    As many `processes` share a long search."""

    def __init__(
        self, question: Question, progress: Callable[[int], None], picture: Path | None, processes: int
    ) -> None:
        self.search: Search = Search(question, progress, processes=processes)
        self._picture = picture
        self._processes = processes

    def as_given(self, launch: argparse.Namespace) -> Plan | None:
        """None if it has no parallel sizes."""
        candidate = candidate_of_launch(launch, self.question)
        if candidate is None:
            return None
        predicted = partial(predict_candidate, question=self.question)
        fitting = None
        if launch.offload_activations == AUTO:
            fitting = first_that_fits(candidate, self.question.budget, predicted)
        return fitting or predicted(candidate)

    def seconds_at_pace_of(self, megatron: Plan) -> float:
        return megatron.seconds

    def nothing_fits(self, left_out: Sequence[str]) -> ValueError:
        return way_out(self.question, left_out)

    def title(self) -> str:
        return plan_text.title(self.question)

    def row(self, plan: Plan) -> Mapping[str, str]:
        return plan_text.row(plan)

    def verdict(self, answer: Answer) -> Iterator[str]:
        yield plan_text.verdict(answer.gain, answer.megatron)
        yield from self.ended_early(answer)
        if answer.megatron is not None:
            yield plan_text.reason(answer.ours[0], answer.megatron, answer.gain)

    def notes(self, flags: Sequence[str]) -> Iterator[str]:
        num_left_out = len(self.search.too_long_for_auto)
        if num_left_out:
            yield f"auto was left out for {num_left_out} of the best: it plans {MOST_ACTIONS_OF_AUTO:,} actions in all."

    def pictures(self, answer: Answer) -> Iterator[Path]:
        if self._picture is not None:
            self._draw(answer, self._picture)
            yield self._picture

    def _draw(self, answer: Answer, path: Path) -> None:
        """Draw every configuration that was simulated, for this memory and for less, and mark what is advised, the best
        of Megatron's own schedules and the launch as given."""
        from ..report.plan_figures import Point, plot_frontier

        def point(plan: Plan) -> Point:
            return Point(plan.memory_gib, plan.tokens_per_second, plan_text.short_name(plan) or "data parallel")

        asked = self.question
        for share in (0.8, 0.6, 0.4, 0.2):
            with_less = replace(asked, memory_gib=share * asked.memory_limit)
            Search(with_less, plans=self.search.plans, processes=self._processes).best(1, exact_below=0.0)
        groups: dict[str, list[Point]] = {name: [] for name in ("whole sequences", "segments", "recomputation")}
        for plan in self.search.plans.values():
            setup = plan.candidate.setup
            if setup.recompute != "none":
                group = "recomputation"
            elif len(setup.segments) > 1:
                group = "segments"
            else:
                group = "whole sequences"
            groups[group].append(point(plan))
        marked = {"advised": answer.advised, "Megatron's own": answer.megatron, "as given": answer.given}
        points = {name: point(plan) for name, plan in marked.items() if plan is not None}
        plot_frontier(groups, points, asked.memory_limit, plan_text.title(asked), path)


class PlansInUnits(PlanKind):
    """Plans for sequences of unequal lengths, of which `histogram` has the number of each, in units of at most so many
    tokens. As many `processes` share the search."""

    def __init__(self, question: Question, histogram: Mapping[int, int], processes: int) -> None:
        self.search: UnitSearch = UnitSearch(question, histogram, processes)

    def as_given(self, launch: argparse.Namespace) -> Plan | None:
        """None if it has no parallel sizes, or no --unit-tokens."""
        if launch.unit_tokens is None:
            return None
        candidate = candidate_of_launch(launch, self.search.average(launch.unit_tokens))
        return None if candidate is None else self.search.predict(replace(candidate, unit_tokens=launch.unit_tokens))

    def seconds_at_pace_of(self, megatron: UnitPlan) -> float:
        return self.search.tokens / megatron.tokens_per_second  # steps of packs have other numbers of tokens

    def nothing_fits(self, left_out: Sequence[str]) -> ValueError:
        return self.search.way_out()

    def title(self) -> str:
        return plan_text.title_of_units(self.search)

    def row(self, plan: UnitPlan) -> Mapping[str, str]:
        return plan_text.row_of_units(self.search, plan)

    def verdict(self, answer: Answer) -> Iterator[str]:
        yield plan_text.verdict_on_units(answer.gain, answer.megatron)
        yield from self.ended_early(answer)

    def notes(self, flags: Sequence[str]) -> Iterator[str]:
        if set(_SEPARATE_DOCUMENTS).isdisjoint(map(name_of, flags)):
            yield f"Units are for sequences that are kept apart: add one of {', '.join(_SEPARATE_DOCUMENTS)}."
