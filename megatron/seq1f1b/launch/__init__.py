"""The composition root: flags and Megatron on one side, our schedules on the other, joined here.

`install` binds an overlay (overlay.py) over Megatron; `validate` makes the configuration of a run (validation.py), and
the first step the executor that the configuration describes (executors.py).
"""

from .install import install, pipeline_config, uninstall, validate
from .model_functions import (
    local_hybrid_spec,
    token_log_probs,
    token_log_probs_and_entropy,
    use_segment_attention,
    whole_weights,
)
