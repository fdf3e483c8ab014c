"""What is alive at each moment: every storage counts once, from its birth to its death.

Tensors without values count like real ones. An operator gives results of the same form as the first time, and the
counts of tokens of experts add up.
"""

import pytest
import torch

from megatron.seq1f1b.rehearsal.ledger import Category, Ledger, workspace_bytes
from megatron.seq1f1b.rehearsal.operators import WithoutValues


def counting(*run):
    ledger = Ledger(*run)
    ledger.begin("F")
    return ledger


def storage(size):
    return torch.empty(size, dtype=torch.uint8)


def test_the_highest_of_several_peaks_counts():
    with counting() as ledger:
        for size in (5, 9, 7):
            storage(size)
        kept, other = storage(4), storage(1)
        ledger.begin("B")
        del kept
        last = storage(2)
    assert [(each.name, each.peak_bytes, each.end) for each in ledger.moments()] == [("F", 9, 5), ("B", 5, 3)]
    del other, last


def test_of_one_kernel_only_what_it_leaves_behind_counts():
    def doubled(tensor):
        terms = storage(50), storage(60)
        return tensor + tensor, terms[0][:0]

    with counting() as ledger:
        given = storage(10)
        result = ledger.as_one_kernel(doubled, given)
        storage(5)
    assert ledger.moments()[0].peak_bytes == 10 + 10 + 50 + 5
    del result


def test_a_label_holds_from_birth_on_for_the_storage_of_a_view():
    with counting() as ledger:
        kept = {"of a segment": storage(100), "other": storage(1), "of the host": storage(1000)}
        storage(7)
        ledger.fill_with(Category.LOGITS)
        storage(6)
        ledger.begin("B")
        ledger.label({"rows": [kept["of a segment"][5:], None]}, Category.STATE)
        ledger.label(kept["of the host"][3:], None)
    peak = ledger.moments()[0].peak
    assert peak == {Category.STATE: 100, Category.ACTIVATIONS: 1, Category.TEMPORARY: 7}, "of one moment is temporary"


def test_a_storage_counts_once_with_its_size_of_the_moment():
    with counting() as ledger:
        x = torch.ones(10, 100)
        kept = [x.view(-1), x[3:], x.t(), x.add_(1)]
        for size in (0, 400):
            ledger.begin(str(size))
            ledger.resize(torch.UntypedStorage.resize_, x.untyped_storage(), size)
        ledger.begin("none")
        del x, kept
    assert [each.end for each in ledger.moments()] == [4000, 0, 400, 0]


def step_of_a_small_network(*run):
    with counting(*run) as ledger:
        layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
        layers(torch.ones(32, 64)).sum().backward()
    return ledger.moments()[0]


def test_tensors_without_values_count_as_real_ones():
    real = step_of_a_small_network()
    assert step_of_a_small_network(WithoutValues()).peak == real.peak
    assert real.peak_bytes > 4 * (64 * 128 + 128 * 8) * 2  # weights and their gradients


def test_nothing_may_follow_from_a_number_that_is_read():
    with counting(WithoutValues()):
        number = torch.ones(4).sum() + torch.ones(())
        assert not number.item() > 0 and not number.item() < 1
        assert not bool(number > 0)
        with pytest.raises(ValueError, match="a whole number is read from a tensor of torch.int64"):
            torch.ones(4).sum().long().item()


@pytest.mark.parametrize("kv_heads, expanded", [(4, 0), (2, 2 * 1 * 300 * 4 * 96 * 2)])
def test_the_backward_of_flash_attention_has_a_workspace(kv_heads, expanded):
    with counting(WithoutValues()) as ledger:
        query = torch.empty(1, 200, 4, 96, dtype=torch.bfloat16)
        key = torch.empty(1, 300, kv_heads, 96, dtype=torch.bfloat16)
        in_fp32 = 4 * 4 * 256 * (96 + 1)  # bytes, heads, queries rounded up to 128s, head and one more
        assert workspace_bytes((query, query, key)) == in_fp32 + expanded
        output, logsumexp, *state, _ = torch.ops.aten._flash_attention_forward(
            query, key, key, None, None, 200, 300, 0.0, True, False
        )
        torch.ops.aten._flash_attention_backward(
            query, query, key, key, output, logsumexp, None, None, 200, 300, 0.0, True, *state
        )
    assert ledger.moments()[0].peak[Category.TEMPORARY] >= in_fp32 + expanded


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
    with counting(WithoutValues()):
        first, again = (
            (x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes(), x.is_meta)
            for x in (make(), make())
        )
    assert first == again and first[-1]


def test_results_depend_on_types_of_numbers_and_share_as_before():
    with counting(WithoutValues()) as ledger:
        x = torch.ones(4, 6)
        kept = [torch.ops.aten._unsafe_view(x, [24]) for _ in range(3)] + [x.add_(1), x.add_(1)]
        assert len({each.untyped_storage()._cdata for each in kept}) == 1
        assert len({each.untyped_storage()._cdata for each in [x + 1 for _ in range(3)]}) == 3
        ledger.begin("numbers")
        whole = torch.ones(4, dtype=torch.long)
        assert [(whole * number).dtype for number in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]
    assert ledger.moments()[0].end == 4 * 24


def test_counts_of_experts_have_values_and_add_up():
    with counting(WithoutValues(2, 3)):
        chosen, probabilities = torch.zeros(100, 3, dtype=torch.bool), torch.zeros(100, 3)
        counts = chosen.sum(dim=0)
        assert counts.tolist() == [66, 67, 67]
        assert counts.reshape(1, 3).sum(axis=1).long().cpu().tolist() == [200]
        assert [piece.shape[0] for piece in torch.zeros(200, 8).split(counts.tolist())] == [66, 67, 67]
        local = chosen[:, 1:3].contiguous()
        assert probabilities[:, 1:3].T.contiguous().masked_select(local.T.contiguous()).shape == (133,)
        assert local.sum(dim=0).sum().item() == 133
        assert torch.arange(8).reshape(-1, 2).T.ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7], "few indices have values"
        assert torch.arange(2**15).is_meta
