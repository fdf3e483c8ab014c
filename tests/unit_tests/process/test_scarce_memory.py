import weakref

import pytest
import torch

from megatron.seq1f1b.process.scarce_memory import lacks_memory, let_go


@pytest.mark.parametrize(
    "error, lacks",
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes differ"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
    ],
)
def test_a_failure_for_want_of_memory_is_known_by_its_words(error, lacks):
    assert lacks_memory(error) == lacks


def test_the_allocator_of_torch_says_that_it_lacks_memory():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert lacks_memory(failure.value)


class Activation:
    pass


def test_what_failed_functions_hold_is_let_go():
    held = []

    def fail(activation):
        held.append(weakref.ref(activation))
        raise MemoryError

    def step(activation):
        try:
            fail(activation)
        except MemoryError as error:
            raise RuntimeError("the step failed") from error

    with pytest.raises(RuntimeError) as failure:
        step(Activation())
    assert held[0]() is not None
    let_go(failure.value)
    assert held[0]() is None
