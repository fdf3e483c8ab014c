"""The loss of each micro-batch, computed once by the program, and what the program reports of it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor
from torch.nn import Parameter

from ..gradients.chunk_sync import ChunkSync
from ..step import Step


class Losses:
    """The losses of one step, on the rank that computes them; a step with backwards has the `syncs` of its chunks."""

    def __init__(self, step: Step, syncs: Sequence[ChunkSync] = ()) -> None:
        self._step = step
        self._syncs = syncs
        self._num_added = 0
        self._num_tokens: list[Tensor] = []
        # By micro-batch, lists to which Megatron's functions append what the program reports.
        self.reports_of: dict[int, list[Any]] = defaultdict(list)

    def count(self, num_tokens: Any) -> None:
        """Add the tokens of a micro-batch, as its loss function counts them. Raises ValueError for a sum of weights
        where gradients are divided by it: Megatron adds up whole numbers."""
        count = torch.as_tensor(num_tokens)
        if count.is_floating_point() and self._step.config.calculate_per_token_loss:
            raise ValueError(
                f"the loss function gives a number of tokens of type {count.dtype}, and with calculate_per_token_loss "
                "Megatron adds up whole numbers; return one, or divide the loss by the sum of its weights, and unset it"
            )
        self._num_tokens.append(count)

    def add(self, chunk: int, microbatch: int, output: Any, loss_func: Callable | None) -> None:
        """Compute the loss of a micro-batch from what its forward step returned; its gradient goes back to the joined
        output of the model."""
        step = self._step
        config = step.config
        if config.timers is not None:
            config.timers("forward-compute", log_level=2).start()  # Megatron's function stops it
        loss, num_tokens = forward_step_calc_loss(
            step.chunks[chunk],
            output,
            None if loss_func is None else self._over_shares(loss_func),
            config,
            vp_stage=chunk if len(step.chunks) > 1 else None,
            collect_non_loss_data=step.collect_non_loss_data,
            num_microbatches=step.num_microbatches,
            forward_data_store=self.reports_of[microbatch],
            cp_group_size=step.groups.cp.size(),
            is_last_stage=True,
        )
        self.count(num_tokens)
        self._num_added += 1
        if step.forward_only or not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        if config.grad_scale_func is not None:
            loss = config.grad_scale_func(loss)
        self._go_backward(loss, self._syncs[chunk])

    def _go_backward(self, loss: Tensor, sync: ChunkSync) -> None:
        """Run the program's part of the backward. It may reach parameters beside the call of the model: those of a head
        that the program applies by itself, or of a penalty on weights."""
        if sync.makes_gradients and _reaches_parameters(loss):
            sync.before_backward()
        if self._num_added == self._step.num_microbatches:
            with sync.last_backward():  # of these parameters
                loss.backward()
        else:
            loss.backward()

    def total_num_tokens(self, device: torch.device) -> Tensor:
        """Unmasked tokens of all micro-batches; zero where no loss is computed."""
        counts = self._num_tokens or [torch.zeros([], dtype=torch.int, device=device)]
        return torch.stack([count.to(device) for count in counts]).sum(dtype=torch.int)

    def reports(self) -> list[Any]:
        """The program's reports, micro-batch by micro-batch."""
        return [report for microbatch in sorted(self.reports_of) for report in self.reports_of[microbatch]]

    def _over_shares(self, loss_func: Callable) -> Callable:
        """A loss function whose mean is over the tokens of all context-parallel ranks. Megatron averages the means of
        their shares, which differ from it where a mask leaves shares unequal numbers of tokens."""
        group = self._step.groups.cp
        if group.size() == 1 or self._step.forward_only or self._step.config.calculate_per_token_loss:
            return loss_func

        def over_shares(output: Any, **options: Any) -> Any:
            result = loss_func(output, **options)
            is_loss_with_tokens = not options and len(result) == 3  # no non_loss_data, and no mean of the program's own
            if not is_loss_with_tokens:
                return result
            loss, num_tokens, report = result
            total = torch.as_tensor(num_tokens).detach().to(self._step.device, copy=True)
            dist.all_reduce(total, group=group)
            loss *= group.size()  # in place, as Megatron divides it: a report may share its memory
            return loss, total, report

        return over_shares


def _reaches_parameters(loss: Tensor) -> bool:
    """Whether the graph of a loss ends at parameters; the model's own end at its joined output."""
    seen = set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), Parameter):
            return True
        left += [before for before, _ in node.next_functions]
    return False
