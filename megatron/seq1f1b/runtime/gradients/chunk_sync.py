"""What the interpreter asks of the data-parallel ranks of a model chunk: weights and gradients, at the right time.

Tested in runtime/test_gradient_sync.py by test_hooks_reduce_in_the_last_backward_or_one_call_does.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext


class ChunkSync:
    """Moves the weights and gradients of one model chunk around its forwards and backwards in a step. This base class
    does nothing, for weights and gradients that stay whole."""

    makes_gradients = False  # whether gradients have memory from the first `before_backward` on only

    def __init__(self) -> None:
        self._no_sync = ExitStack()

    def gather(self) -> None:
        """Before the first forward of the chunk: start to gather the weights."""

    def before_forward(self) -> None:
        """Wait for the weights."""

    def before_backward(self) -> None:
        """Wait for the weights, and for room for the gradients."""

    def last_backward(self) -> AbstractContextManager[None]:
        """Inside, the last backward of the chunk runs."""
        return nullcontext()

    def reduce(self) -> None:
        """After the last backward: start to reduce the gradients."""

    def release(self) -> None:
        """After the last action of the chunk for now: the weights are not needed."""

    def close(self) -> None:
        """Leave `no_sync`, at the end of a step, also a failed one."""
        self._no_sync.close()
