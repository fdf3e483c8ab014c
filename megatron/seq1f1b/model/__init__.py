"""A Megatron model on one segment: attention with a KV cache, positions, losses, separate weight gradients."""

from .attach import (
    attach,
    recompute_behind_frozen_weights,
    refuse_attention_to_later_tokens,
    use_segment_attention,
)
from .host_memory import link_rate
from .local_hybrid import local_hybrid_spec
from .loss_pieces import PIECE, compute_loss_in_pieces
from .packed_documents import Documents, differs
from .prediction_heads import LookAhead, PredictionHeads
from .segment import Segment, SegmentContext
from .token_logits import PieceLogits, token_log_probs, token_log_probs_and_entropy
from .weight_gradient import add_up_all_weight_gradients, defer_weight_gradients
