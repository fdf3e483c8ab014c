"""Memory of keys and values where ranks share heads."""

from dataclasses import replace

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.planning.costs.layer_bytes import layer_keys_values
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup


def test_context_parallelism_divides_keys_and_values_by_heads():
    alone = TrainingSetup(preset("mixtral-8x7b"), sequence_length=8192, num_microbatches=1, tensor_parallel=2)
    heads = alone.model.num_kv_heads // 2
    kept = {
        size: layer_keys_values(replace(alone, context_parallel=size), 0, 0, 8192) for size in (1, 2, heads, 4 * heads)
    }
    assert kept[1] == 4 * 8192 * heads * alone.model.head_dim
    assert kept[2] == kept[1] / 2
    assert kept[heads] == kept[4 * heads] == kept[1] / heads
