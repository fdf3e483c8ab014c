"""A repeated forward of experts draws the random numbers of the first, with pairs and without."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from functional_tests.equality.cases import Case, Layout
from functional_tests.equality.comparison import TOLERANCE, error, segmentation
from functional_tests.equality.layout import build
from functional_tests.equality.models import Model
from functional_tests.equality.step import run
from functional_tests.equality.suites import PAIRED, selective
from megatron.seq1f1b.runtime import PipelineExecutor
from megatron.seq1f1b.schedule import ScheduleChoice
from support.on_ranks import on_ranks

CASES = Case("1f1b", 1, 3, "even", "random"), Case("zb-h1", 3, 3, "uneven", "random")
JITTER = PAIRED.but(add_bias_linear=False, moe_input_jitter_eps=0.2)
RECOMPUTED = ("moe",), ("layernorm", "moe")
EXCHANGING = Layout(expert=2)


def gradients(model: Model, case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Of one step of two replicas that share the experts, with the random numbers of the seed."""
    chunks = build(model, EXCHANGING)
    executor = PipelineExecutor(ScheduleChoice(case.family, pairs=model.pairs), segmentation(case))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    _, found = run(executor, chunks, case, first=dist.get_rank(), step=dist.get_world_size())
    return {name: gradient.clone() for name, gradient in found.items()}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(error(found[name], wanted[name]) for name in wanted)


@on_ranks(2)
def test_recomputation_keeps_the_jitter_of_inputs():
    """Whose gradients are those of another seed's to a digit at most."""
    for case in CASES:
        usual = gradients(JITTER.but(pairs=False), case, seed=1)
        assert distance(gradients(JITTER.but(pairs=False), case, seed=2), usual) > 1e-2
        for modules in RECOMPUTED:
            for pairs in (True, False):
                found = gradients(selective(JITTER, *modules).but(pairs=pairs), case, seed=1)
                assert distance(found, usual) < TOLERANCE[torch.float64], (case.label, modules, pairs)
