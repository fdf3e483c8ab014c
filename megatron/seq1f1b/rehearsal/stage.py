"""One pipeline stage of the launch, in a process of its own: built, and run for one step, on tensors without values."""

import gc
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.transformer_layer import TransformerLayer

from ..model import use_segment_attention
from ..patches import Patch, patched
from .ledger import Category, StorageCounter
from .operators import ExpertCounts, WithoutValues
from .recorder import StepRecorder
from .report import StageReport
from .stand_ins import fake_batches, is_fused_on_gpu, spared


class _Ended(BaseException):
    """Leaves Megatron's `pretrain` after the step that was rehearsed."""


class Stage:
    """One pipeline stage, which goes through Megatron's `pretrain` up to the end of its first step.

    `watched(function, recorder)` makes a forward-backward function report its actions to the recorder. With
    `is_fake=False` all tensors are real and the other ranks must run too, so that a real step can be counted.
    """

    def __init__(
        self,
        args: Namespace,
        watched: Callable[[Callable, StepRecorder], Callable],
        progress: Callable[[float], None] = lambda _: None,
        is_fake: bool = True,
    ) -> None:
        self._args = args
        self._watched = watched
        self._is_fake = is_fake
        self.counter = StorageCounter(args.device, _without_values(args) if is_fake else None)
        self._recorder = StepRecorder(self.counter, progress)
        self._num_parameters = self._num_layers = self._host_bytes = 0

    def run(self, pretrain: Callable[[], None]) -> StageReport:
        """The report after `pretrain()`, Megatron's own with all its arguments. Raises ValueError if it ends early."""
        with self._takes_part():
            try:
                pretrain()
            except _Ended:
                return self._report()
        raise ValueError("the launch ends without a training step")

    @contextmanager
    def _takes_part(self) -> Iterator[None]:
        """Inside, Megatron's `pretrain` calls this object around its model, its data and its step."""
        around = (
            ("setup_model_and_optimizer", self._set_up, "is counted"),
            ("build_train_valid_test_data_iterators", self._data, "its batches come from the host, so are not counted"),
            ("train_step", self._step, "is counted, and the last"),
        )
        table = (
            *(Patch(f"megatron.training.training.{name}", new, why, wraps=True) for name, new, why in around),
            Patch("torch.UntypedStorage.resize_", self.counter.resize, "is counted", wraps=True),
            Patch("megatron.seq1f1b.model.host_memory.mapped_buffer", self._buffer, "is counted apart", wraps=True),
        )
        with patched(table), patched(spared(self._args)) if self._is_fake else nullcontext():
            yield

    def _report(self) -> StageReport:
        return StageReport(
            rank=self._args.rank,
            stages=tuple(sorted(self._recorder.stages)),
            num_layers=self._num_layers,
            num_parameters=self._num_parameters,
            moments=list(self.counter.ledger.moments()),
            traffic=self._recorder.traffic,
            num_communicators=len(self._recorder.groups),
            is_on_gpu=self._args.device != "cpu",
            host_bytes=self._host_bytes,
        )

    def _buffer(self, mapped_buffer: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
        def counted(num_bytes: int) -> torch.Tensor:
            self._host_bytes += num_bytes
            with self.counter.paused():
                return torch.empty(num_bytes, dtype=torch.uint8) if self._is_fake else mapped_buffer(num_bytes)

        return counted

    def _set_up(self, set_up: Callable) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counter.ledger.begin("build", Category.TEMPORARY)
            with self.counter:
                chunks, optimizer, scheduler = set_up(*args, **kwargs)
            if self._is_fake and is_fused_on_gpu(self._args):
                use_segment_attention(chunks)  # whole sequences, too, have fused attention on a GPU
            gc.collect()
            self._label(chunks, optimizer)
            self._recorder.watch(chunks)
            modules = [module for chunk in chunks for module in chunk.modules()]
            self._num_layers = sum(isinstance(module, TransformerLayer) for module in modules)
            self._num_parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
            return chunks, optimizer, scheduler

        return counted

    def _label(self, chunks: Iterable[torch.nn.Module], optimizer: Any) -> None:
        """Label what is alive after the model and its optimizer are built."""
        counter = self.counter
        main = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        counter.label(main, Category.OPTIMIZER)
        for chunk in chunks:
            counter.label((*chunk.parameters(), *chunk.module.buffers()), Category.WEIGHTS)
            # Megatron's DistributedDataParallel keeps parameters and gradients in buffers, those of experts apart.
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                counter.label([buffer.grad_data], Category.GRADIENTS)
                if buffer.param_data is not None:
                    counter.label([buffer.param_data], Category.WEIGHTS)
            if hasattr(chunk, "partitioned_state"):
                shares = chunk.partitioned_state.shares
                counter.label((share.weights for share in shares), Category.WEIGHTS)
                counter.label((share.gradients for share in shares), Category.GRADIENTS)

    def _step(self, train_step: Callable) -> Callable:
        signature = inspect.signature(train_step)

        def counted(*args: Any, **kwargs: Any) -> Any:
            step, ledger = signature.bind(*args, **kwargs), self.counter.ledger
            optimizer = step.arguments["optimizer"]
            run = self._watched(step.arguments["forward_backward_func"], self._recorder)

            def run_then_optimizer(**options: Any) -> Any:
                reports = run(**options)
                ledger.begin("optimizer step", Category.TEMPORARY)
                return reports

            step.arguments["forward_backward_func"] = run_then_optimizer
            with self.counter:
                # Adam makes its moments in its first step, so a step as all later ones comes after it.
                ledger.begin("first optimizer step", Category.TEMPORARY)
                optimizer.step()
                self.counter.label(_states(optimizer), Category.OPTIMIZER)
                ledger.begin("step begins")
                train_step(*step.args, **step.kwargs)
            raise _Ended

        return counted

    def _data(self, build: Callable) -> Callable:
        def uncounted(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
            if self._is_fake:
                self._args.do_train, self._args.do_valid, self._args.do_test = True, False, False
                return RerunDataIterator(_Uncounted(fake_batches(self._args), self.counter)), None, None
            train, valid, test = build(*args, **kwargs)
            if train is not None:
                train.iterable = _Uncounted(train.iterable, self.counter)
            return train, valid, test

        return uncounted


def _without_values(args: Namespace) -> Callable[[Any, tuple, dict], Any]:
    if not args.num_experts:
        return WithoutValues()
    return ExpertCounts(args.moe_router_topk, args.num_experts)


class _Uncounted:
    def __init__(self, batches: Iterator[Any], counter: StorageCounter) -> None:
        self._batches = batches
        self.counter = counter

    def __next__(self) -> Any:
        with self.counter.paused():
            return next(self._batches)


def _states(optimizer: Any) -> Iterator[torch.Tensor]:
    """What the optimizer keeps from step to step beside the parameters that it steps."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
