"""One pipeline stage of the launch, in a process of its own: built, and run for one step, on tensors without values.

Tested in functional_tests/test_rehearsal.py by test_counted_bytes_are_those_of_the_real_step.
"""

import gc
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator

from ..model import use_segment_attention
from ..process.patches import patched, wrapping
from ..runtime import Surroundings, watched
from .fakes import fake_batches, patches, surroundings
from .launch import has_transformer_engine
from .ledger import Category, Ledger
from .operators import WithoutValues
from .report import StageReport


class _Ended(BaseException):
    """Leaves Megatron's `pretrain` after the rehearsed step."""


class RehearsedStage:
    """Runs Megatron's `pretrain` for one pipeline stage up to the end of its first step; `rehearse_in(surroundings)`
    gives that step its surroundings. A GPU holds `bytes_outside(communicators)` outside the allocator."""

    def __init__(
        self,
        args: Namespace,
        rehearse_in: Callable[[Surroundings], None],
        bytes_outside: Callable[[int], int],
    ) -> None:
        self._args = args
        self._rehearse_in = rehearse_in
        self._bytes_outside = bytes_outside
        self.ledger = Ledger(WithoutValues(args.moe_router_topk, args.num_experts or 0))
        self._stand_ins = patches(args, self.ledger.as_one_kernel)
        self._surroundings = surroundings(args, self.new_buffer)
        self._num_parameters = 0
        self._host_bytes = 0

    def run(self, pretrain: Callable[[], None]) -> StageReport:
        """The report after `pretrain()`, Megatron's own with all its arguments. Raises ValueError if it ends early."""
        training = "megatron.training.training"
        counted = "is counted"
        table = [
            wrapping(f"{training}.setup_model_and_optimizer", self._set_up, counted),
            wrapping(f"{training}.build_train_valid_test_data_iterators", self._data, "makes batches, on the host"),
            wrapping(f"{training}.train_step", self._step, f"{counted}, and the last"),
            wrapping("torch.UntypedStorage.resize_", self.ledger.resize, counted),
        ]
        self._rehearse_in(self._surroundings)
        with patched([*table, *self._stand_ins]), suppress(_Ended):
            pretrain()
            raise ValueError("the launch ends without a training step")
        return StageReport(
            rank=self._args.rank,
            stages=self.ledger.stages,
            num_parameters=self._num_parameters,
            moments=self.ledger.moments(),
            sent=self.ledger.sent,
            received=self.ledger.received,
            outside=self._bytes_outside(len(self.ledger.groups)) if self._args.device != "cpu" else 0,
            host_bytes=self._host_bytes,
        )

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        """A buffer in the memory of the host, which is counted apart."""
        self._host_bytes += num_bytes
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self.ledger.label(buffer, None)
        return buffer

    def _set_up(self, set_up: Callable, *args: Any, **kwargs: Any) -> Any:
        self.ledger.begin("build", Category.TEMPORARY)
        with self.ledger:
            chunks, optimizer, scheduler = set_up(*args, **kwargs)
        # On GPUs Transformer Engine's attention is a fused kernel for whole sequences, too.
        if has_transformer_engine(self._args) and self._args.attention_backend.name != "local":
            use_segment_attention(chunks, self._surroundings.kernels_of)
        gc.collect()
        label = self.ledger.label
        label([group["params"] for group in optimizer.param_groups], Category.OPTIMIZER)
        for chunk in chunks:
            label([*chunk.parameters(), *chunk.module.buffers()], Category.WEIGHTS)
            # Megatron's DistributedDataParallel keeps parameters and gradients in buffers, those of experts apart.
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                label(buffer.grad_data, Category.GRADIENTS)
                label(buffer.param_data, Category.WEIGHTS)
            if hasattr(chunk, "partitioned_state"):
                shares = chunk.partitioned_state.shares
                label([share.weights for share in shares], Category.WEIGHTS)
                label([share.gradients for share in shares], Category.GRADIENTS)
            self._num_parameters += sum(parameter.numel() for parameter in chunk.parameters())
        return chunks, optimizer, scheduler

    def _step(self, train_step: Callable, *args: Any, **kwargs: Any) -> None:
        step = inspect.signature(train_step).bind(*args, **kwargs).arguments
        run = watched(step["forward_backward_func"], self.ledger)

        def run_then_optimizer(**options: Any) -> Any:
            reports = run(**options)
            self.ledger.begin("optimizer step", Category.TEMPORARY)
            return reports

        with self.ledger:
            # Adam makes its moments in its first step; the rehearsed step is one like all later ones.
            self.ledger.begin("first optimizer step", Category.TEMPORARY)
            step["optimizer"].step()
            for part in getattr(step["optimizer"], "chained_optimizers", [step["optimizer"]]):
                self.ledger.label(list(part.optimizer.state.values()), Category.OPTIMIZER)
            self.ledger.begin("start of the step")
            train_step(**step | {"forward_backward_func": run_then_optimizer})
        raise _Ended

    def _data(self, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
        self._args.do_train = True
        self._args.do_valid = False
        self._args.do_test = False
        return RerunDataIterator(self._uncounted(fake_batches(self._args))), None, None

    def _uncounted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches that are labelled as tensors of the host."""
        for batch in batches:
            self.ledger.label(batch, None)
            yield batch
