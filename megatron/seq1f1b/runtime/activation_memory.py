"""Where the activations of a rank wait for their backwards.

Tested in runtime/test_offload.py.
"""

from dataclasses import dataclass, field

from ..model import PIECE, HostMemory


@dataclass(frozen=True)
class ActivationMemory:
    """What forwards keep for backwards, and where; by default on the device, but for the logits of whole sequences.

    - `loss_piece`: the number of logits in a piece of the loss (model/memory/loss_pieces.py); None keeps all logits.
    - `keeps_attention`: recomputation repeats all of a layer but its attention.
    - `offloads`: the share of activations that moves to the host, from 0 to 1.
    - `host_memory`: holds the activations that have moved, and knows whether they move layer by layer.
    """

    loss_piece: int | None = PIECE
    keeps_attention: bool = False
    offloads: float = 0.0
    host_memory: HostMemory = field(default_factory=HostMemory)

    @property
    def moves_layers(self) -> bool:
        """Whether activations move layer by layer, not as whole units."""
        return self.host_memory.layers_leaving > 0
