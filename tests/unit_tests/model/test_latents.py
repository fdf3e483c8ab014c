"""What multi-latent attention keeps of its segments, and when; the equality suites compare its gradients."""

from types import SimpleNamespace

import torch

from megatron.seq1f1b.model.attention.latents import LARGEST_SHARE, LatentCache, share_of_projection
from megatron.seq1f1b.model.attention.segment_attention import _Attend, _Cached
from megatron.seq1f1b.model.kernels import AttentionRule, KernelChoice
from support.segments import of_lengths

LENGTHS, LENGTH, BATCH, HEADS, RANK, SIZE, ROTARY, VALUE = (40, 30, 20), 90, 2, 3, 6, 8, 4, 5


def attended(cache, segment):
    """The output of a layer, as Megatron's modules call it."""
    shapes = (HEADS, SIZE + ROTARY), (RANK,), (ROTARY,)
    inputs = [torch.randn(segment.length, BATCH, *shape, dtype=torch.float64) for shape in shapes]
    query, latent, rotary = (x.requires_grad_() for x in inputs)
    projected, _ = cache.project(latent, segment)
    keys, values = projected.unflatten(2, (HEADS, -1)).split([SIZE, VALUE], -1)
    keys = torch.cat([keys, rotary.unsqueeze(2).expand(-1, -1, HEADS, -1)], -1)
    kernel = KernelChoice().kernel(AttentionRule((SIZE + ROTARY) ** -0.5), query, values)
    cached = _Cached(cache, segment, end=lambda: None)
    return _Attend.apply(query, keys, values, None, cache.prefix, kernel, cached)


def test_kept_are_latents_and_rotary_keys_and_their_gradients():
    weight = torch.randn(HEADS * (SIZE + VALUE), RANK, dtype=torch.float64, requires_grad=True)
    cache, kept, outputs = LatentCache(LENGTH, lambda latent: (latent @ weight.T, None), SIZE), [], []

    def count():
        kept.append(sum(rows._rows.untyped_storage().nbytes() for rows in cache.rows))
        kept[-1] += sum(rows._sum.numel() * 8 for rows in cache.rows if rows._sum is not None)
        assert cache._projected is cache.prefix is None

    for segment in of_lengths(LENGTHS):
        outputs.append(attended(cache, segment))
        count()
    while len(outputs) > 1:
        outputs.pop().sum().backward()
        count()
    row = BATCH * (RANK + ROTARY) * 8
    assert kept == [row * LENGTH] * 3 + [row * (LENGTH + 70), row * (LENGTH + 40)]


def test_values_are_read_where_they_were_projected():
    """In place, with what lies before them; copied where kernels could not read that many numbers at once."""
    for size, value_size, is_in_place in ((16, 8, True), (12, 8, False)):
        weight = torch.randn(HEADS * (size + value_size), RANK)
        cache = LatentCache(LENGTH, lambda latent, weight=weight: (latent @ weight.T, None), size)
        (segment,) = of_lengths((LENGTH,))
        projected, _ = cache.project(torch.randn(LENGTH, BATCH, RANK), segment)
        cache.write(0, LENGTH, torch.randn(LENGTH, BATCH, HEADS, size + ROTARY), projected)
        _, values = cache.read(0, LENGTH)
        assert torch.equal(values, projected.unflatten(2, (HEADS, -1))[..., size:])
        assert (values.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()) == is_in_place


def test_latents_are_kept_where_projecting_again_is_cheap():
    deepseek = SimpleNamespace(kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    assert share_of_projection(deepseek, 4096) < LARGEST_SHARE < share_of_projection(deepseek, 2048)
