"""Floating-point operations of a training step by the formula of each paper, for TFLOPS that can be compared."""

from megatron.seq1f1b.costs.blocks import paper_flops
from megatron.seq1f1b.costs.model_shape import ModelShape


def seq1f1b_flops(model: ModelShape, sequence_length: int, batch: int) -> float:
    """FLOPs of `batch` sequences, forward and backward, as the authors of Seq1F1B count (their get_seq_tflops).

    Attention is causal; the embedding counts as a matrix product; nothing is added for recomputation.
    """
    per_token, per_pair = paper_flops(model)
    return 3.0 * batch * (per_token * sequence_length + per_pair * sequence_length**2 / 2)


def megatron_flops(model: ModelShape, sequence_length: int, batch: int, recomputes: bool = True) -> float:
    """FLOPs of `batch` sequences by arXiv 2104.04473, equation 3: attention is not causal.

    With `recomputes` the forward counts twice, as in that paper (factor 96), else once (factor 72).
    """
    layers = model.num_layers
    hidden = model.hidden_size
    length = sequence_length
    factor, head = (96, 16) if recomputes else (72, 12)
    per_token = factor * layers * hidden**2
    return batch * length * per_token * (1 + length / (6 * hidden) + model.vocab_size / (head * layers * hidden))


def terapipe_flops(model: ModelShape, sequence_length: int, batch: int) -> float:
    """FLOPs of `batch` sequences by the code of the authors of TeraPipe (flop_model.py).

    It counts one of the two products of attention, not causal.
    """
    tokens = batch * sequence_length * model.hidden_size
    scores = batch * model.num_heads * sequence_length**2
    layer = tokens * (12 * model.hidden_size + 7) + scores * (model.head_dim + 1)
    return 6.0 * model.num_layers * layer
