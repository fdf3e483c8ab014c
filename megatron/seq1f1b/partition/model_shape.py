"""The sizes of a GPT model that decide what a segment costs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the whole model, before it is cut over ranks.

    `head_dim` is the size of one attention head; `vocab_size` is the padded vocabulary.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
