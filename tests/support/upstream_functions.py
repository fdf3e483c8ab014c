"""Megatron's three `forward_backward_*` functions, run by our interpreter instead, to test what callers rely on.

They check their arguments as Megatron's own do, even where our schedules would go on (a number of micro-batches that
does not suit interleaving, say). What our interpreter does not run goes to Megatron's own function.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.seq1f1b.arguments.supported import Use, first_unsupported
from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.schedule import Named

NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def replace_functions() -> None:
    """Make Megatron's `get_forward_backward_func`, which looks its functions up in its module, return ours."""
    functions = UpstreamFunctions(
        PipelineExecutor(Named("1f1b"), Segmentation()),
        {name: getattr(schedules, name) for name in NAMES},
        lambda config: first_unsupported(vars(config), {Use.ANY_SCHEDULE}) is not None,
    )
    for name in NAMES:
        setattr(schedules, name, getattr(functions, name))


class UpstreamFunctions:
    """Methods with the names and arguments of Megatron's functions.

    `run` takes the same arguments. `megatrons` are Megatron's own functions by name, called where
    `is_unsupported(config)` holds for the configuration of the model.
    """

    def __init__(self, run: Callable, megatrons: Mapping[str, Callable], is_unsupported: Callable[[Any], bool]) -> None:
        self._run = run
        self._megatrons = dict(megatrons)
        self._is_unsupported = is_unsupported
        self._alone: dist.ProcessGroup | None = None

    def forward_backward_no_pipelining(self, *, model: Any, data_iterator: Any, **step: Any) -> list[Any]:
        """One rank with one model chunk; process groups for pipelines are not looked at."""
        model, data_iterator = _only(model), _only(data_iterator)
        assert step.pop("adjust_tensor_shapes_fn", None) is None, "without a pipeline there are no shapes to adjust"
        config = get_model_config(model)
        if self._is_unsupported(config):
            return self._megatrons[NAMES[0]](model=model, data_iterator=data_iterator, **step)
        step.pop("p2p_communicator", None)
        collection = step.get("pg_collection")
        if collection is not None:
            _check_groups(collection)
            if getattr(collection, "pp", None) is None or collection.pp.size() > 1:
                step["pg_collection"] = self._without_pipeline(collection)
        return self._run(model=model, data_iterator=data_iterator, **step)

    def forward_backward_pipelining_without_interleaving(
        self, *, model: Any, data_iterator: Any, **step: Any
    ) -> list[Any]:
        """One model chunk on each of several ranks."""
        model, data_iterator = _only(model), _only(data_iterator)
        communicator, collection = step.get("p2p_communicator"), step.get("pg_collection")
        config = get_model_config(model)
        is_usual = type(communicator) in (type(None), P2PCommunicator) and isinstance(
            collection, (type(None), ProcessGroupCollection)
        )
        if not is_usual or step.get("adjust_tensor_shapes_fn") is not None or self._is_unsupported(config):
            return self._megatrons[NAMES[1]](model=model, data_iterator=data_iterator, **step)
        if config.overlap_p2p_comm:
            raise ValueError("overlap_p2p_comm needs several model chunks")
        _check_groups_of_pipeline(communicator, collection)
        return self._run(model=model, data_iterator=data_iterator, **step)

    def forward_backward_pipelining_with_interleaving(
        self, *, model: Any, data_iterator: Any, num_microbatches: int, **step: Any
    ) -> list[Any]:
        """Several model chunks on each of several ranks."""
        config = get_model_config(model[0])
        communicator, collection = step.get("p2p_communicator"), step.get("pg_collection")
        _check_groups_of_pipeline(communicator, collection)
        assert isinstance(model, list), "interleaving needs a list of model chunks"
        assert all(isinstance(chunk, torch.nn.Module) for chunk in model), "a model chunk is a torch.nn.Module"
        assert isinstance(data_iterator, list), "interleaving needs a list of data iterators, one a model chunk"
        assert step.pop("adjust_tensor_shapes_fn", None) is None, "interleaving does not adjust shapes"
        step |= {"model": model, "data_iterator": data_iterator, "num_microbatches": num_microbatches}
        if self._is_unsupported(config):
            return self._megatrons[NAMES[2]](**step)
        if config.overlap_p2p_comm and config.batch_p2p_comm:
            raise ValueError("overlap_p2p_comm and batch_p2p_comm exclude each other")
        _check_group_size(config, num_microbatches, communicator)
        return self._run(**step)

    def _without_pipeline(self, collection: ProcessGroupCollection) -> ProcessGroupCollection:
        """The collection with a pipeline of this rank alone."""
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return ProcessGroupCollection(**{**vars(collection), "pp": self._alone})


def _only(chunks: Any) -> Any:
    """The one model chunk, or its data iterator."""
    if not isinstance(chunks, list):
        return chunks
    assert len(chunks) == 1, "several model chunks need interleaving"
    return chunks[0]


def _check_groups(collection: ProcessGroupCollection) -> None:
    for name in ("tp", "cp"):
        assert getattr(collection, name) is not None, f"pg_collection needs {name}"


def _check_groups_of_pipeline(communicator: P2PCommunicator | None, collection: ProcessGroupCollection | None) -> None:
    if (communicator is None) != (collection is None):
        raise ValueError("give both p2p_communicator and pg_collection, or neither")
    if collection is not None:
        assert hasattr(communicator, "config"), "p2p_communicator needs config"
        _check_groups(collection)


def _check_group_size(config: Any, num_microbatches: int, communicator: P2PCommunicator | None) -> None:
    """The number of micro-batches must suit Megatron's order of interleaving."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group() if communicator is None else communicator.pp_group
    size = config.microbatch_group_size_per_vp_stage
    if not group.size() <= size <= num_microbatches:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {size}; it has to be between the number of pipeline ranks "
            f"({group.size()}) and that of micro-batches ({num_microbatches})"
        )
    rest = num_microbatches % size
    if 0 < rest < group.size():
        raise RuntimeError(
            f"{num_microbatches} micro-batches leave {rest} in the last group of {size}, fewer than the "
            f"{group.size()} pipeline ranks"
        )
