"""A model that several papers measured."""

from megatron.seq1f1b.costs.model_shape import ModelShape

LLAMA_7B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_heads=32,
    head_dim=128,
    vocab_size=32000,
    is_gated=True,
)
