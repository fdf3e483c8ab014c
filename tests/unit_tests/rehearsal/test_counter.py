"""Storages are counted once, from birth to death, on tensors with values as on those without."""

import pytest
import torch

from megatron.seq1f1b.rehearsal.ledger import Category, StorageCounter, workspace_bytes
from megatron.seq1f1b.rehearsal.operators import NeedsValues, WithoutValues


def one_moment(counter):
    (moment,) = counter.ledger.moments()
    return moment


def counter_in_a_moment(device="cpu", **options):
    counter = StorageCounter(device, **options)
    counter.ledger.begin("F")
    return counter


def test_a_storage_counts_once_however_many_views_it_has():
    with counter_in_a_moment() as counter:
        x = torch.ones(10, 100)
        kept = [x.view(-1), x[3:], x.t(), x.add_(1)]
    assert one_moment(counter).end == 4000
    del x, kept
    assert one_moment(counter).end == 0


def test_a_storage_that_is_resized_counts_with_its_new_size():
    with counter_in_a_moment() as counter:
        resize = counter.resize(torch.UntypedStorage.resize_)
        x = torch.ones(1000)
        resize(x.untyped_storage(), 0)
        assert one_moment(counter).end == 0
        resize(x.untyped_storage(), 400)
    assert one_moment(counter).end == 400 and one_moment(counter).peak_bytes == 4000
    del x
    assert one_moment(counter).end == 0


def test_tensors_made_while_paused_and_their_views_do_not_count():
    with counter_in_a_moment() as counter:
        with counter.paused():
            batch = torch.ones(1000)
        part = batch[:10]
        copy = part.clone()
    assert one_moment(counter).end == 40
    del copy


def test_a_label_finds_the_storage_of_a_view():
    with counter_in_a_moment() as counter:
        x = torch.ones(1000)
        counter.label([x[5:]], Category.STATE)
    assert one_moment(counter).peak == {Category.STATE: 4000}


def step_of_a_small_network():
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    layers(torch.ones(32, 64)).sum().backward()
    return layers


def test_tensors_without_values_count_as_real_ones():
    with counter_in_a_moment() as real:
        step_of_a_small_network()
    with counter_in_a_moment(run=WithoutValues()) as without:
        step_of_a_small_network()
    assert one_moment(without).peak == one_moment(real).peak
    assert sum(one_moment(real).peak.values()) > 4 * (64 * 128 + 128 * 8) * 2  # weights and their gradients


def test_nothing_may_follow_from_a_number_that_is_read():
    with counter_in_a_moment(run=WithoutValues()):
        number = torch.ones(4).sum() + torch.ones(())
        assert not number.item() > 0 and not number.item() < 1
        assert not bool(number > 0)
        with pytest.raises(NeedsValues, match="a whole number is read from a tensor of torch.int64"):
            torch.ones(4).sum().long().item()


@pytest.mark.parametrize("kv_heads, expanded", [(4, 0), (2, 2 * 1 * 300 * 4 * 96 * 2)])
def test_the_backward_of_flash_attention_has_a_workspace(kv_heads, expanded):
    with counter_in_a_moment("cuda", run=WithoutValues()) as counter:
        query = torch.empty(1, 200, 4, 96, dtype=torch.bfloat16)
        key = torch.empty(1, 300, kv_heads, 96, dtype=torch.bfloat16)
        operator = torch.ops.aten._flash_attention_backward.default
        in_fp32 = 4 * 4 * 256 * (96 + 1)  # bytes, heads, queries rounded up to 128s, head and one more
        assert workspace_bytes(operator, (query, query, key)) == in_fp32 + expanded
        assert workspace_bytes(torch.ops.aten.add.Tensor, (query, query)) == 0
        output, logsumexp, *state, _ = torch.ops.aten._flash_attention_forward(
            query, key, key, None, None, 200, 300, 0.0, True, False
        )
        torch.ops.aten._flash_attention_backward(
            query, query, key, key, output, logsumexp, None, None, 200, 300, 0.0, True, *state
        )
    assert one_moment(counter).peak[Category.TEMPORARY] >= in_fp32 + expanded
