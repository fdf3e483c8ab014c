"""What is alive at each moment: every storage counts once, from its birth to its death.

Tensors without values count like real ones. An operator gives results of the same form as the first time, and the
counts of tokens of experts add up.
"""

import pytest
import torch

from megatron.seq1f1b.rehearsal.ledger import Category, Ledger, workspace_bytes
from megatron.seq1f1b.rehearsal.operators import NeedsValues, WithoutValues


def counting(run=lambda function, args, kwargs: function(*args, **kwargs)):
    ledger = Ledger(run)
    ledger.begin("F")
    return ledger


def moments_of(ledger):
    return {moment.name: moment for moment in ledger.moments()}


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
    moments = moments_of(ledger)
    assert (moments["F"].peak_bytes, moments["F"].end) == (9, 5)
    assert (moments["B"].peak_bytes, moments["B"].end) == (5, 3)
    del other, last


def test_of_one_kernel_only_what_it_leaves_behind_counts():
    def doubled(tensor):
        terms = storage(50), storage(60)
        return tensor + tensor, terms[0][:0]

    with counting() as ledger:
        given = storage(10)
        result = ledger.as_one_kernel(doubled, given)
        storage(5)
    assert moments_of(ledger)["F"].peak_bytes == 10 + 10 + 50 + 5
    del result


def test_a_label_holds_from_birth_on_for_the_storage_of_a_view():
    with counting() as ledger:
        kept = {"of a segment": storage(100), "other": storage(1)}
        ledger.begin("B")
        ledger.label({"rows": [kept["of a segment"][5:], None]}, Category.STATE)
    assert moments_of(ledger)["F"].peak == {Category.STATE: 100, Category.ACTIVATIONS: 1}


def test_activations_of_one_moment_are_temporaries():
    with counting() as ledger:
        kept = storage(10)
        storage(7)
        ledger.fill_with(Category.LOGITS)
        storage(6)
    assert moments_of(ledger)["F"].peak == {Category.ACTIVATIONS: 10, Category.TEMPORARY: 7}
    del kept


def one_moment(ledger):
    (moment,) = ledger.moments()
    return moment


def test_a_storage_counts_once_however_many_views_it_has():
    with counting() as ledger:
        x = torch.ones(10, 100)
        kept = [x.view(-1), x[3:], x.t(), x.add_(1)]
    assert one_moment(ledger).end == 4000
    del x, kept
    assert one_moment(ledger).end == 0


def test_a_storage_that_is_resized_counts_with_its_new_size():
    with counting() as ledger:
        x = torch.ones(1000)
        ledger.resize(torch.UntypedStorage.resize_, x.untyped_storage(), 0)
        assert one_moment(ledger).end == 0
        ledger.resize(torch.UntypedStorage.resize_, x.untyped_storage(), 400)
    assert one_moment(ledger).end == 400 and one_moment(ledger).peak_bytes == 4000
    del x
    assert one_moment(ledger).end == 0


def test_tensors_made_while_paused_and_their_views_do_not_count():
    with counting() as ledger:
        with ledger.paused():
            batch = torch.ones(1000)
        part = batch[:10]
        copy = part.clone()
    assert one_moment(ledger).end == 40
    del copy


def step_of_a_small_network():
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    layers(torch.ones(32, 64)).sum().backward()
    return layers


def test_tensors_without_values_count_as_real_ones():
    with counting() as real:
        step_of_a_small_network()
    with counting(WithoutValues()) as without:
        step_of_a_small_network()
    assert one_moment(without).peak == one_moment(real).peak
    assert sum(one_moment(real).peak.values()) > 4 * (64 * 128 + 128 * 8) * 2  # weights and their gradients


def test_nothing_may_follow_from_a_number_that_is_read():
    with counting(WithoutValues()):
        number = torch.ones(4).sum() + torch.ones(())
        assert not number.item() > 0 and not number.item() < 1
        assert not bool(number > 0)
        with pytest.raises(NeedsValues, match="a whole number is read from a tensor of torch.int64"):
            torch.ones(4).sum().long().item()


@pytest.mark.parametrize("kv_heads, expanded", [(4, 0), (2, 2 * 1 * 300 * 4 * 96 * 2)])
def test_the_backward_of_flash_attention_has_a_workspace(kv_heads, expanded):
    with counting(WithoutValues()) as counter:
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
    assert one_moment(counter).peak[Category.TEMPORARY] >= in_fp32 + expanded


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
        first, again = make(), make()
    form = first.shape, first.stride(), first.dtype, first.storage_offset(), first.untyped_storage().nbytes()
    assert form == (again.shape, again.stride(), again.dtype, again.storage_offset(), again.untyped_storage().nbytes())
    assert first.is_meta and first.untyped_storage()._cdata != again.untyped_storage()._cdata


def test_numbers_of_other_types_give_other_results():
    with counting(WithoutValues()):
        whole = torch.ones(4, dtype=torch.long)
        assert [(whole * number).dtype for number in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_sharing_the_storage_of_an_argument_is_remembered():
    with counting(WithoutValues()) as counted:
        x = torch.ones(4, 6)
        kept = [torch.ops.aten._unsafe_view(x, [24]) for _ in range(3)] + [x.add_(1), x.add_(1)]
    assert one_moment(counted).end == 4 * 24 and len(kept) == 5


def test_counts_have_values_and_add_up():
    with counting(WithoutValues(2, 3)):
        chosen = torch.zeros(100, 3, dtype=torch.bool)
        counts = chosen.sum(dim=0)
        assert counts.tolist() == [66, 67, 67]
        assert counts.reshape(1, 3).sum(axis=1).long().cpu().tolist() == [200]
        assert [piece.shape[0] for piece in torch.zeros(200, 8).split(counts.tolist())] == [66, 67, 67]


def test_what_a_map_selects_has_the_size_of_its_counts():
    with counting(WithoutValues(2, 4)):
        chosen, probabilities = torch.zeros(100, 4, dtype=torch.bool), torch.zeros(100, 4)
        local = chosen[:, 1:3].contiguous()
        assert probabilities[:, 1:3].T.contiguous().masked_select(local.T.contiguous()).shape == (100,)
        assert local.sum(dim=0).sum().item() == 100


def test_few_indices_keep_their_values():
    with counting(WithoutValues(1, 4)):
        assert torch.arange(8).reshape(-1, 2).T.ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
        assert torch.arange(2**15).is_meta
