"""Trainings of policies, by the parts of a framework that are given a case: with segments and without."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from frameworks.both_ways import both_ways
from frameworks.equal_steps import Training
from frameworks.models import save_dense_and_experts

VOCABULARY = 64
# Tokens of the prompts and responses of a batch: a few long rollouts among short ones.
LENGTHS = ((5, 90), (9, 20), (3, 7), (12, 60), (6, 33), (10, 5), (4, 71), (8, 16))


@dataclass
class PolicyTraining(Training):
    """With gradients of the first step by name, log-probabilities of rollouts before and after the steps, and the
    weights that are exported in the end."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    exported: dict[str, torch.Tensor] = field(default_factory=dict)

    def note_gradients(self, chunks: Iterable[Any], gradient_of: Callable[[Any], torch.Tensor]) -> None:
        """Keep the gradients of the weights of model chunks, if none are known."""
        if self.gradients:
            return
        for number, wrapped in enumerate(chunks):
            for name, weight in unwrap_model(wrapped).named_parameters():
                if weight.requires_grad:
                    self.gradients[f"{number}.{name}"] = gradient_of(weight).clone()


# Trains the model in the first folder by a case, and exports weights to the second.
type Train = Callable[[Path, Any, Path], PolicyTraining]


def trained_twice(
    folder: Path, cases: Mapping[str, Any], train: Train
) -> dict[str, tuple[PolicyTraining, PolicyTraining]]:
    """Every case, with segments of 16 tokens and without segments."""
    save_dense_and_experts(folder, VOCABULARY)
    results = {}
    for name, case in cases.items():
        model = folder / ("experts" if case.has_experts else "dense")
        own_case = replace(case, sizes=case.own_sizes or case.sizes)
        results[name] = both_ways(
            name,
            partial(train, model, case, folder / f"{name}-ours"),
            partial(train, model, own_case, folder / f"{name}-own"),
            pipeline_schedule=case.schedule,
        )
    return results


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What all ranks have exported in Hugging Face's format."""
    from safetensors.torch import load_file

    dist.barrier()
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def require_equal_gradients(trainings: Sequence[Mapping[str, Any]], case: str) -> None:
    """Compare the gradients of a case of `trainings`, by rank and case, on every rank: to 1e-5 of the size of each."""
    for of_rank in trainings:
        ours, own = of_rank[case]
        assert ours.gradients.keys() == own.gradients.keys() and own.gradients
        for name, gradient in own.gradients.items():
            difference = (ours.gradients[name] - gradient).norm()
            assert difference <= 1e-5 * gradient.norm() + 1e-9, name


def require_equal_log_probabilities(ours: PolicyTraining, own: PolicyTraining) -> None:
    assert len(own.before) == len(own.after)
    torch.testing.assert_close(ours.before, own.before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.after, own.after, rtol=1e-5, atol=1e-5)


def require_equal_weights(ours: PolicyTraining, own: PolicyTraining) -> None:
    torch.testing.assert_close(ours.exported, own.exported, rtol=1e-5, atol=1e-6)
