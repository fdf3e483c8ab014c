"""What operators return the second time has the form of the first, in storages of its own."""

import pytest
import torch

from megatron.seq1f1b.rehearsal.ledger import StorageCounter
from megatron.seq1f1b.rehearsal.operators import WithoutValues

X, Y = (torch.ones(4, 6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
RESULTS = {
    "another type": lambda: X.to("meta") * Y.to("meta"),
    "of a number": lambda: Y.to("meta") * 2.5,
    "in a type": lambda: torch.ones(4, 6).sum(dtype=torch.float64),
    "of a transposed one": lambda: torch.ones(4, 6).t() + 1,
    "several": lambda: torch.native_layer_norm(torch.ones(4, 6), [6], None, None, 1e-5)[1],
    "a view": lambda: torch.ones(4, 6)[1:, ::2],
    "in place": lambda: torch.ones(4, 6).mul_(2),
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_forms_are_those_of_the_first_time(make):
    with counter():
        first, again = make(), make()
    form = first.shape, first.stride(), first.dtype, first.storage_offset(), first.untyped_storage().nbytes()
    assert form == (again.shape, again.stride(), again.dtype, again.storage_offset(), again.untyped_storage().nbytes())
    assert first.is_meta and first.untyped_storage()._cdata != again.untyped_storage()._cdata


def test_numbers_of_other_types_give_other_results():
    with counter():
        whole = torch.ones(4, dtype=torch.long)
        assert [(whole * number).dtype for number in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_sharing_the_storage_of_an_argument_is_remembered():
    with counter() as counted:
        x = torch.ones(4, 6)
        kept = [torch.ops.aten._unsafe_view(x, [24]) for _ in range(3)] + [x.add_(1), x.add_(1)]
    (moment,) = counted.ledger.moments()
    assert moment.end == 4 * 24 and len(kept) == 5


def counter():
    counted = StorageCounter("cpu", WithoutValues())
    counted.ledger.begin("F")
    return counted
