"""Where in a pipeline the layers of multi-token prediction are, and what follows for the messages."""

from typing import Any

from megatron.core.transformer.enums import LayerType

from ..schedule import Placement


def prediction_stage(config: Any, placement: Placement) -> int | None:
    """The stage with the layers of multi-token prediction: the last unless a layout places them; None without them."""
    if not getattr(config, "mtp_num_layers", None):
        return None
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return placement.num_stages - 1
    ranks = placement.num_ranks
    return next(
        stage for stage in range(placement.num_stages) if LayerType.mtp in layout.layout[stage % ranks][stage // ranks]
    )


def rows_per_token(config: Any, placement: Placement, stage: int) -> int:
    """Rows of activations that `stage` sends for a token: behind multi-token prediction, one more for each depth."""
    predicting = prediction_stage(config, placement)
    return 1 if predicting is None or stage < predicting else 1 + config.mtp_num_layers
