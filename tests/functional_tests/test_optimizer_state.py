"""Checkpoints of the distributed optimizer, where gradient buffers have several buckets."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.nn import Parameter

import megatron.seq1f1b
from functional_tests.equality.models import Model, mixture
from support.launch import TINY_GPT

# Sizes with which the buckets before the last do not end at a multiple of 128 elements, to which Megatron pads them.
PLAIN = Model(dtype=torch.float32, layers=2).but(ffn_hidden_size=60)
MIXTURE = mixture(moe_token_dispatcher_type="alltoall", moe_ffn_hidden_size=23).but(dtype=torch.float32)
SMALL = {"overlap_grad_reduce": True, "bucket_size": 700}
PREDICTION = {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tmL"}
# Each cause of several buckets: a model, the sizes of its layout, and options of Megatron's DistributedDataParallel.
CAUSES: dict[str, tuple[Model, dict[str, int], dict[str, Any]]] = {
    "small buckets": (PLAIN, {}, SMALL),
    "small buckets in bf16": (PLAIN.but(dtype=torch.bfloat16), {}, SMALL),
    "small buckets of experts": (MIXTURE, {"expert_model_parallel_size": 2}, SMALL),
    "tied embeddings": (PLAIN.but(tied=True), {"pipeline_model_parallel_size": 2}, {}),
    "an embedding for prediction": (PLAIN.but(**PREDICTION), {"pipeline_model_parallel_size": 2}, {}),
}
FEW = [
    ("small buckets", 2),
    ("small buckets of experts", 1),
    ("tied embeddings", 1),
    ("an embedding for prediction", 1),
]


def chunk_of(cause: str) -> DistributedDataParallel:
    plain, sizes, ddp = CAUSES[cause]
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    config = plain.transformer_config(**sizes)
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    built = plain.build(config, is_first, is_last, None)
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True, **ddp), built)


def optimizers_of(chunk: DistributedDataParallel) -> list[Any]:
    """Megatron's distributed optimizers, with values in all their tensors."""
    is_bf16 = chunk.config.params_dtype is torch.bfloat16
    config = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=is_bf16, use_distributed_optimizer=True)
    optimizers = get_megatron_optimizer(config, [chunk]).chained_optimizers
    for optimizer in optimizers:
        optimizer._init_optimizer_states_with_dummy_values()
        for _, tensors in own_tensors(optimizer):
            for tensor in tensors.values():
                tensor.copy_(torch.rand_like(tensor))
    return optimizers


def own_tensors(optimizer: Any) -> Iterator[tuple[Parameter, dict[str, Tensor]]]:
    """Each parameter of which this rank has a part, and the optimizer's tensors of that part."""
    for parameter in optimizer.model_param_gbuf_map:
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        yield parameter, {name: tensor.data for name, tensor in tensors.items() if name != "step"}


def parameters_of(optimizer: Any) -> Iterator[Parameter]:
    """All parameters of this rank's buffers, in the order of a checkpoint."""
    return chain.from_iterable(buffer.param_index_map for buffer in optimizer.buffers)


def saved(optimizer: Any, weights: dict, save: Callable) -> dict[int, dict[str, Tensor]]:
    """What a checkpoint has of the optimizer, by the number of each parameter."""
    found = save(optimizer, weights, metadata={})
    return {number: {name: each.data for name, each in of.items()} for number, of in found.items()}


def check_checkpoints(cause: str) -> tuple[int, int]:
    """Checkpoints have the optimizer's own tensors, and give them back. Returns the number of buckets before the last
    that end off their padding, and how many optimizers refuse what Megatron saves without us."""
    megatron.seq1f1b.install(sequence_splits=2)
    save, num_padded, num_refused = DistributedOptimizer.sharded_param_state_fully_reshardable, 0, 0
    chunk = chunk_of(cause)
    weights = chunk.sharded_state_dict()
    for optimizer in optimizers_of(chunk):
        for buffer in optimizer.buffers:
            num_padded += sum(bucket.numel_unpadded < len(bucket.grad_data) for bucket in buffer.buckets[:-1])
        optimizer._copy_main_params_to_model_params()
        for part in nested_values(optimizer.sharded_param_state_dp_reshardable(weights, metadata={})):
            if isinstance(part, ShardedTensor):
                assert part.global_offset[0] + len(part.data) <= part.global_shape[0]
                assert part.local_shape == part.data.shape
        state, displaced = saved(optimizer, weights, save), saved(optimizer, weights, save.__wrapped__)
        order = {parameter: number for number, parameter in enumerate(parameters_of(optimizer))}
        expected = {}
        for parameter, tensors in own_tensors(optimizer):
            place = optimizer._get_model_param_range_map(parameter)["param"]
            there = state[order[parameter]]
            assert there.keys() == tensors.keys() == {"param", "exp_avg", "exp_avg_sq"}
            for name, tensor in tensors.items():
                assert torch.equal(there[name].flatten()[place.start : place.end], tensor), (name, tensor.shape)
                expected[parameter, name] = tensor.clone()
        try:
            optimizer.load_parameter_state_from_fully_reshardable(displaced)
        except ValueError as error:
            assert "add --no-load-optim to go on from the weights" in str(error)
            num_refused += 1
        asked = optimizer.sharded_param_state_fully_reshardable(weights, is_loading=True, metadata={})
        for number, of in asked.items():
            assert {name: each.data.shape for name, each in of.items()} == {
                name: each.shape for name, each in state[number].items()
            }
        for _, tensors in own_tensors(optimizer):
            tensors["exp_avg"].zero_()
            tensors["exp_avg_sq"].zero_()
        # A program of its own may load its model later.
        for parameter in order:
            parameter.data.normal_()
        optimizer.load_parameter_state_from_fully_reshardable(state)
        for parameter, tensors in own_tensors(optimizer):
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected[parameter, name])
    return num_padded, num_refused


CASES = [(cause, replicas) for cause in CAUSES for replicas in (1, 2, 3)]


@pytest.mark.parametrize(
    "cause, replicas",
    [pytest.param(*case, marks=[] if case in FEW else pytest.mark.exhaustive) for case in CASES],
)
def test_a_checkpoint_has_the_tensors_of_the_optimizer(launch, cause, replicas):
    _, sizes, _ = CAUSES[cause]
    model_parallel = sizes.get("pipeline_model_parallel_size", 1) * sizes.get("expert_model_parallel_size", 1)
    found = launch.call(replicas * model_parallel, check_checkpoints, cause=cause)
    assert sum(num_padded for num_padded, _ in found) > 0
    assert sum(num_refused for _, num_refused in found) > 0


# Of all layouts whose checkpoints go on: flags, and the ranks of one replica.
LAUNCHES = {
    "small buckets": (("--overlap-grad-reduce", "--ddp-bucket-size", 4000), 1),
    "small buckets of experts": (
        (
            *("--overlap-grad-reduce", "--ddp-bucket-size", 4000, "--swiglu", "--disable-bias-linear"),
            *("--num-experts", 4, "--expert-model-parallel-size", 2, "--moe-token-dispatcher-type", "alltoall"),
        ),
        2,
    ),
    "tied embeddings": (("--pipeline-model-parallel-size", 2, "--num-layers", 6), 2),
    "an embedding for prediction": (
        (
            *("--pipeline-model-parallel-size", 2, "--pipeline-model-parallel-layout", "Ett|ttmL"),
            *("--mtp-num-layers", 1, "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
        ),
        2,
    ),
    "small buckets of a partitioned state": (
        (
            *("--overlap-grad-reduce", "--ddp-bucket-size", 4000),
            *("--partition-state", "--pipeline-schedule", "breadth-first"),
        ),
        1,
    ),
}
RUN = (
    *(
        *TINY_GPT,
        "--mock-data",
        "--train-iters",
        4,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        12,
        "--sequence-splits",
        2,
    ),
    *("--ckpt-format", "torch_dist", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
)
LAUNCHED = [(cause, replicas) for cause in LAUNCHES for replicas in (1, 2, 3)]
EVERYDAY = [("small buckets", 2), ("small buckets of a partitioned state", 2)]


@pytest.mark.parametrize(
    "cause, replicas",
    [pytest.param(*case, marks=[] if case in EVERYDAY else pytest.mark.exhaustive) for case in LAUNCHED],
)
def test_losses_go_on_to_the_last_digit(launch, tmp_path, cause, replicas):
    flags, model_parallel = LAUNCHES[cause]
    ranks = replicas * model_parallel
    expected = launch(ranks, [*RUN, *flags, "--save", tmp_path, "--save-interval", 2]).check().losses()
    job = launch(ranks, [*RUN, *flags, "--load", tmp_path, "--ckpt-step", 2]).check()
    assert len(expected) == 4 and job.losses() == expected[2:]
