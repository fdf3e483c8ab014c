"""Every expert gets the same share of the tokens, and all that follows from the counts has values."""

import torch

from megatron.seq1f1b.rehearsal.ledger import StorageCounter
from megatron.seq1f1b.rehearsal.operators import ExpertCounts


def counting(topk, num_experts):
    counter = StorageCounter("cpu", ExpertCounts(topk, num_experts))
    counter.ledger.begin("F")
    return counter


def test_counts_have_values_and_add_up():
    with counting(topk=2, num_experts=3):
        chosen = torch.zeros(100, 3, dtype=torch.bool)
        counts = chosen.sum(dim=0)
        assert counts.tolist() == [66, 67, 67]
        assert counts.reshape(1, 3).sum(axis=1).long().cpu().tolist() == [200]
        assert [piece.shape[0] for piece in torch.zeros(200, 8).split(counts.tolist())] == [66, 67, 67]


def test_what_a_map_selects_has_the_size_of_its_counts():
    with counting(topk=2, num_experts=4):
        chosen, probabilities = torch.zeros(100, 4, dtype=torch.bool), torch.zeros(100, 4)
        local = chosen[:, 1:3].contiguous()
        assert probabilities[:, 1:3].T.contiguous().masked_select(local.T.contiguous()).shape == (100,)
        assert local.sum(dim=0).sum().item() == 100


def test_few_indices_keep_their_values():
    with counting(topk=1, num_experts=4):
        assert torch.arange(8).reshape(-1, 2).T.ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
        assert torch.arange(2**15).is_meta
