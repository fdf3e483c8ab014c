"""What work takes: the sizes of a model, FLOPs, devices, and the times of segments, by formula or measured.

Start with stage_costs (what a segment costs on a stage) and action_costs (what the actions of a schedule cost).
"""

from .flops import authors_flops, layer_flops
from .model_shape import DeltaNet, Experts, LatentAttention, Mamba, ModelShape
from .stage_costs import (
    A100,
    CPU_CORE,
    AnalyticTime,
    StageCost,
    action_costs,
    analytic_costs,
    bottleneck_time,
)
from .traced_costs import FitError, read_traced_costs

__all__ = [
    "A100",
    "CPU_CORE",
    "AnalyticTime",
    "DeltaNet",
    "Experts",
    "FitError",
    "LatentAttention",
    "Mamba",
    "ModelShape",
    "StageCost",
    "action_costs",
    "analytic_costs",
    "authors_flops",
    "bottleneck_time",
    "layer_flops",
    "read_traced_costs",
]
