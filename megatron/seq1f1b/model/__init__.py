"""A Megatron model on one segment: attention with a KV cache, positions, losses, separate weight gradients."""

from .attach import (
    KernelsOf,
    attach,
    context_of,
    recompute_behind_frozen_weights,
    refuse_attention_to_later_tokens,
    refuse_unknown_layers,
    use_segment_attention,
)
from .context_parts import Run, parts_of_rank
from .kernels import KernelChoice
from .layers.prediction_heads import LookAhead, PredictionHeads
from .layers.replayed_routes import routes_set_for
from .masks import differs, starts_of_documents
from .memory.copies import link_rate
from .memory.host_memory import HostMemory
from .memory.layer_ends import LayerEnds
from .memory.loss_pieces import PIECE, compute_loss_in_pieces
from .memory.storages import free_values, tensor_of
from .memory.token_log_probs import token_log_probs, token_log_probs_and_entropy
from .memory.token_logits import PieceLogits
from .memory.weight_gradient import add_up_all_weight_gradients, defer_weight_gradients
from .packed_documents import Documents
from .segment import Segment, SegmentContext
