"""Our schedules in programs without Megatron's training loop and arguments."""

import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from functools import partial
from types import ModuleType

import megatron.core.pipeline_parallel as of_megatron
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as imported_before
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training import checkpointing
from torch.utils._python_dispatch import TorchDispatchMode

import megatron.seq1f1b
from functional_tests.equality.cases import Case
from functional_tests.equality.models import SEQUENCE, Model, mixture
from functional_tests.equality.step import batches, forward_step, run
from megatron.seq1f1b.files.schedule_file import write_schedule
from megatron.seq1f1b.files.timeline_file import read_timeline
from megatron.seq1f1b.process.patches import patched
from megatron.seq1f1b.runtime.gradients.partition_patches import patches_of_training_loop
from megatron.seq1f1b.schedule import Placement, Shape, build

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def model_of(plain: Model, number: int = 1, experts: int = 1, **ddp) -> list[DistributedDataParallel]:
    """So many chunks on this rank of two pipeline stages; nothing here is ours."""
    virtual = number if number > 1 else None
    parallel_state.initialize_model_parallel(1, 2, virtual, expert_model_parallel_size=experts)
    model_parallel_cuda_manual_seed(1)
    config = plain.transformer_config(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=experts,
    )
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for chunk in range(number):
        place = {"ignore_virtual": False, "vp_stage": chunk if virtual else None}
        is_first = parallel_state.is_pipeline_first_stage(**place)
        built = plain.build(config, is_first, parallel_state.is_pipeline_last_stage(**place), place["vp_stage"])
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), built))
    return chunks


def step(options: dict, packed: str | None = None, imports_before: bool = False) -> tuple:
    """Reports and gradients of a program that installs our schedules if it has options for them."""
    if options:
        megatron.seq1f1b.install(**options)
    get_function = imported_before if imports_before else of_megatron.get_forward_backward_func
    model = model_of(Model())
    return run(get_function(), model, Case("", 1, 3, "even", "random", packed), 0, 1)


def assert_equal(ours: list[tuple], own: list[tuple]) -> None:
    """Results of both ranks."""
    for rank, ((reports, gradients), (own_reports, own_gradients)) in enumerate(zip(ours, own, strict=True)):
        assert len(reports) == len(own_reports) == 3 * rank
        for mine, other in zip(reports, own_reports, strict=True):
            assert torch.allclose(mine["lm loss"], other["lm loss"], rtol=1e-10)
        assert gradients.keys() == own_gradients.keys()
        for name, gradient in gradients.items():
            assert (gradient - own_gradients[name]).abs().max() <= 1e-10 * own_gradients[name].abs().max(), name


@pytest.fixture(scope="module")
def megatrons_own(launch):
    return launch.call(2, step, options={})


def test_losses_and_gradients_are_those_without_us(launch, megatrons_own):
    """Here of a program that has imported Megatron's function before."""
    options = {"pipeline_schedule": "zb-h1", "sequence_splits": "4", "sequence_split_strategy": "even"}
    assert_equal(launch.call(2, step, options=options, imports_before=True), megatrons_own)
    assert launch.last.log.count("steps are run by megatron.seq1f1b: zb-h1, segments: 4") == 1


def test_a_schedule_from_a_file_and_a_trace(launch, megatrons_own, tmp_path):
    write_schedule(build("auto", Shape(Placement(2), 3, 2)), tmp_path / "mine.csv")
    options = {"pipeline_schedule_file": tmp_path / "mine.csv", "sequence_splits": 2}
    options |= {"pipeline_trace": str(tmp_path), "pipeline_trace_iterations": "1"}
    assert_equal(launch.call(2, step, options=options), megatrons_own)
    assert len(read_timeline(tmp_path / "iteration-1-pipeline-0.json").ranks[0]) >= 12


def test_a_schedule_from_a_file_takes_micro_batches_in_any_order(launch, megatrons_own, tmp_path):
    """The stages differ in it here; each reads them in their own order."""
    order = build("gpipe", Shape(Placement(2), 3))
    first, last = order.ranks
    forwards = first[:3]
    backwards = first[3:]
    write_schedule(replace(order, ranks=((*reversed(forwards), *backwards), last)), tmp_path / "mine.csv")
    options = {"pipeline_schedule_file": tmp_path / "mine.csv"}
    assert_equal(launch.call(2, step, options=options), megatrons_own)


def step_with_frozen_embedding() -> str:
    """What ends the first step of a model whose embedding is frozen, but not the output layer tied to it."""
    megatron.seq1f1b.install(sequence_splits=2)
    chunks = model_of(Model(tied=True, freezes_embedding=True))
    with pytest.raises(ValueError) as error:
        run(of_megatron.get_forward_backward_func(), chunks, Case("", 1, 3, "even", "random"), 0, 1)
    return str(error.value)


def test_an_embedding_frozen_without_its_copy_is_refused(launch):
    """Megatron's sum of the gradients of both would wait for ever."""
    for sentence in launch.call(2, step_with_frozen_embedding):
        assert sentence.startswith(
            "the embedding is frozen on pipeline rank 0, but its tied copy on pipeline rank 1 is not"
        )


def step_with_a_feature_on_one_rank() -> str:
    """What ends the first step of a model that rank 1 has with a feature that is not supported. Without it both ranks
    then take a step."""
    megatron.seq1f1b.install(sequence_splits=2)
    chunks = model_of(Model())
    config = chunks[0].config
    of_megatron_itself = config.experimental_attention_variant
    if dist.get_rank() == 1:
        config.experimental_attention_variant = "gated_delta_net"
    take_step = partial(run, of_megatron.get_forward_backward_func(), chunks, Case("", 1, 3, "even", "random"), 0, 1)
    with pytest.raises(ValueError) as error:
        take_step()
    config.experimental_attention_variant = of_megatron_itself
    take_step()
    return str(error.value)


def test_a_feature_of_one_rank_is_refused_by_all(launch):
    for sentence in launch.call(2, step_with_a_feature_on_one_rank):
        assert sentence.startswith("--experimental-attention-variant"), sentence


@pytest.fixture(scope="module")
def masked(launch):
    """Megatron's own, with a mask that keeps documents apart."""
    return launch.call(2, step, options={}, packed="mask")


@pytest.mark.parametrize(
    "packed, given", [("mask", {}), ("cu_seqlens", {}), ("tokens", {"keep_documents_apart": True})]
)
def test_documents_of_a_batch_are_kept_apart(launch, megatrons_own, masked, packed, given):
    """Of a mask or a packed format that the model is called with; by positions that start anew if that is asked for."""
    options = {"sequence_splits": 3, "sequence_split_strategy": "balanced", **given}
    assert_equal(launch.call(2, step, options=options, packed=packed), masked)
    assert not torch.allclose(masked[1][0][0]["lm loss"], megatrons_own[1][0][0]["lm loss"])


@pytest.mark.parametrize(
    "options, packed, sentence",
    [
        ({"partition_state": True}, None, r"partition_state needs DistributedDataParallelConfig\("),
        ({"sequence_splits": 60}, None, "--sequence-splits 60 leaves empty segments: --seq-length 56 has only 56"),
    ],
)
def test_what_cannot_be_honoured_is_a_value_error(launch, options, packed, sentence):
    with pytest.raises(AssertionError, match=f"exit code 1;(?s:.*)ValueError: {sentence}"):
        launch.call(2, step, options=options, packed=packed)


def compile_helpers() -> None:
    """As Megatron-Bridge does at its start: the wheel of megatron-core has no makefile for it."""
    megatron.seq1f1b.install(sequence_splits=2)
    from megatron.core.datasets.utils import compile_helpers

    compile_helpers()


def install_twice_and_uninstall() -> None:
    """As a program and its framework may, another install without keywords or with the same does nothing. After an
    uninstall, also of what imported the function before or since, it may have others."""
    upstream = [imported_before]  # in a list, where no name is bound anew
    megatron.seq1f1b.uninstall()
    for segments in (2, 4):
        for given in ({"sequence_splits": segments}, {"sequence_splits": segments}, {}):
            megatron.seq1f1b.install(**given)
        with pytest.raises(ValueError, match="install was called before with other keywords; call it once"):
            megatron.seq1f1b.install(sequence_splits=3)
        assert upstream[0] is not imported_before is of_megatron.get_forward_backward_func
        imports = ModuleType("a_module_that_imports_it_after_an_install")
        imports.name = of_megatron.get_forward_backward_func
        sys.modules[imports.__name__] = imports
        megatron.seq1f1b.uninstall()
        assert upstream[0] is imported_before is imports.name is of_megatron.get_forward_backward_func


@pytest.mark.parametrize("program", [compile_helpers, install_twice_and_uninstall])
def test_a_program_can(launch, program):
    launch.call(1, program)


class Elements(TorchDispatchMode):
    """Elements that collectives of shares move to, or from, the other ranks of their group."""

    # The place of the whole tensor, and of the share, among the arguments of a collective.
    PLACES = {"_allgather_base_": ("gathered", 0, 1), "_reduce_scatter_base_": ("reduced", 1, 0)}
    PLACES["allgather_into_tensor_coalesced_"] = PLACES["_allgather_base_"]
    PLACES["reduce_scatter_tensor_coalesced_"] = PLACES["_reduce_scatter_base_"]

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and (name := func._schema.name.partition("::")[2]) in self.PLACES:
            kind, whole, share = self.PLACES[name]
            self.counts[kind] += _size(args[whole]) - _size(args[share])
        return func(*args, **(kwargs or {}))


def _size(tensors) -> int:
    return tensors.numel() if isinstance(tensors, torch.Tensor) else sum(each.numel() for each in tensors)


def with_penalty(data_iterator, model):
    """A step whose loss reaches weights beside the call of the model."""
    output, loss_func = forward_step(data_iterator, model)

    def with_penalty_on_weights(losses):
        loss, count, report = loss_func(losses)
        return loss + model.module.output_layer.weight.square().sum() * count, count, report

    return output, with_penalty_on_weights


def trained(partitions: bool, layers: int = 4, calls=1, experts=1, step=forward_step, **sizes: int) -> dict:
    """Three steps of Adam of a program with a layer in each chunk, each on the gradients of several calls of Megatron's
    function, of three micro-batches each: losses and norms, weights, and what the last step moves and holds."""
    options = {"partition_state": True} if partitions else {}
    megatron.seq1f1b.install(pipeline_schedule="breadth-first", sequence_splits=2, **options)
    plain = Model() if experts == 1 else mixture(moe_token_dispatcher_type="alltoall")
    plain = plain.but(dtype=torch.float32, layers=layers, **sizes)
    chunks = model_of(plain, layers // 2, experts, **OVERLAP)
    config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=0.1)
    optimizer, losses = get_megatron_optimizer(config, chunks), []
    for _ in range(3):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with Elements() as elements:
            for call in range(calls):
                for chunk in chunks:
                    chunk.config.finalize_model_grads_func = finalize_model_grads if call == calls - 1 else None
                reports = of_megatron.get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=[batches(Case("", 1, 3, "even", "random"), call, 2) for _ in chunks],
                    model=chunks,
                    num_microbatches=3,
                    seq_length=SEQUENCE,
                    micro_batch_size=2,
                )
            _, norm, _ = optimizer.step()
        losses.append(([report["lm loss"].tolist() for report in reports], norm))
    found = {"losses": losses, **elements.counts}
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)  # which overlap_param_gather leaves to the next forward
    if partitions:
        settings = Namespace(ckpt_format="torch_dist", no_save_optim=True, no_save_rng=True)
        with patched(patches_of_training_loop()):
            assert checkpointing.generate_state_dict(settings, chunks, None, None, None)["model0"]
    found["there"] = sum(weight.untyped_storage().nbytes() for chunk in chunks for weight in chunk.parameters())
    with megatron.seq1f1b.whole_weights(chunks):
        return found | {"chunks": [torch.cat([weight.flatten() for weight in chunk.parameters()]) for chunk in chunks]}


def of_a_mixture(pairs: bool) -> tuple:
    """A step of a program whose model's configuration may ask for pairs: reports and gradients."""
    megatron.seq1f1b.install(pipeline_schedule="1f1b", sequence_splits=3)
    chunks = model_of(mixture(moe_token_dispatcher_type="alltoall"), experts=2)
    # Megatron's own check of it asks for 16 bits and several chunks.
    chunks[0].config.overlap_moe_expert_parallel_comm = pairs
    return run(of_megatron.get_forward_backward_func(), chunks, Case("", 1, 3, "even", "random"), 0, 1)


def test_a_program_runs_forwards_beside_backwards(launch):
    plain, paired = (launch.call(4, of_a_mixture, pairs=pairs) for pairs in (False, True))
    assert "1f1b in pairs" in launch.last.log
    for replica in (0, 1):
        assert_equal(paired[replica::2], plain[replica::2])


def both(launch, **given) -> list[tuple[dict, dict]]:
    """What four ranks found with a whole state and with a partitioned one."""
    return list(zip(*(launch.call(4, trained, partitions=each, **given) for each in (False, True)), strict=True))


def test_a_partitioned_state_trains_a_program_alike(launch):
    """Losses, norms and weights of three steps of Adam are the same numbers; no weights are there after them, and after
    they were read for a checkpoint. In a step, however many its micro-batches, weights of a stage are gathered twice,
    but for those of the two chunks that end the forward and begin the backward, and their gradients are reduced once:
    (DP - 1)/DP of each goes between replicas."""
    for whole, partitioned in both(launch, layers=8, hidden_size=64):
        assert whole["there"] > 0 == partitioned["there"]
        assert whole["losses"] == partitioned["losses"]
        assert all(map(torch.equal, whole["chunks"], partitioned["chunks"]))
        sizes = [len(chunk) for chunk in partitioned["chunks"]]
        assert partitioned["reduced"] == pytest.approx(sum(sizes) / 2, rel=0.005)
        assert partitioned["gathered"] == pytest.approx(sum(sizes) - sum(sizes[-2:]) / 2, rel=0.005)


def test_a_partitioned_state_has_gradients_of_a_penalty(launch):
    """Which goes backward before the chunk does."""
    for whole, partitioned in both(launch, step=with_penalty):
        assert whole["losses"] == partitioned["losses"]
        assert all(map(torch.equal, whole["chunks"], partitioned["chunks"]))


def test_a_partitioned_state_adds_up_gradients_of_two_calls(launch):
    """In another order than a whole one. Of experts divided among both replicas, no other rank has a share."""
    for whole, partitioned in both(launch, calls=2, experts=2):
        norms = ([norm for _, norm in each["losses"]] for each in (whole, partitioned))
        assert next(norms) == pytest.approx(next(norms), rel=1e-5)
