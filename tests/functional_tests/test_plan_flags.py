"""What the planner prints goes through Megatron's parser and its checks, and through ours."""

import shlex

import pytest

from functional_tests.test_launch_flags import parsed
from megatron.seq1f1b.commands.launch_flags import decided_flags
from megatron.seq1f1b.commands.model_flags import model_of, read_model, training_flags
from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.planner import Candidate, Question, candidates

DENSE = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8 --vocab-size 32768 --swiglu "
    "--disable-bias-linear --group-query-attention --num-query-groups 4"
)
MIXTURE = (
    f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 256 "
    "--moe-layer-freq [0]*2+[1]*6"
)
# What a user adds to the flags of a preset, and what a CPU without Transformer Engine needs.
REST = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 2 --lr 1e-4 --eval-iters 0 "
    "--transformer-impl local --no-masked-softmax-fusion --no-gradient-accumulation-fusion --device cpu"
)
# Sizes of tensor, context, pipeline, data and expert parallelism, model chunks, segments, schedule.
PLANS = {
    "dense": (DENSE, (2, 1, 4, 2, 1), 1, 4, "zb-h1"),
    "chunks": (DENSE, (1, 2, 2, 4, 1), 2, 4, "1f1b"),
    "layout": (DENSE, (2, 1, 2, 4, 1), 3, 4, "1f1b"),
    "experts": (MIXTURE, (2, 1, 2, 4, 4), 2, 1, "breadth-first"),
}


def planned(words: str, sizes: tuple[int, ...], chunks: int, segments: int, family: str) -> Candidate:
    question = Question(model_of(read_model(words.split())), read_machine("a100-80gb"), 16, 8192, 16)
    for candidate in candidates(question):
        setup = candidate.setup
        found = setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel
        if (
            (*found, setup.expert_parallel) == sizes
            and (setup.placement.num_chunks, len(setup.segments), setup.family) == (chunks, segments, family)
            and setup.recompute == "none"
        ):
            return candidate
    raise LookupError(f"no candidate of {sizes}")


@pytest.fixture(scope="module")
def seen(launch) -> dict[str, dict]:
    jobs = []
    for plan in PLANS.values():
        flags = [plan[0], *training_flags(8192), *decided_flags(planned(*plan)), REST]
        jobs.append({"flags": shlex.split(" ".join(flags)), "environment": {"WORLD_SIZE": "16"}})
    return dict(zip(PLANS, parsed(launch, jobs), strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_megatron_and_our_validation_take_a_plan(seen, name):
    assert "error" not in seen[name], seen[name]["error"]
    _, (_, _, _, data, _), _, segments, _ = PLANS[name]
    candidate = planned(*PLANS[name])
    assert seen[name]["num_layers"] == 8
    assert seen[name]["data_parallel_size"] == data
    assert seen[name]["global_batch_size"] == candidate.setup.global_batch_size
    assert tuple(seen[name]["cut"]) == candidate.setup.segments and len(seen[name]["cut"]) == segments
