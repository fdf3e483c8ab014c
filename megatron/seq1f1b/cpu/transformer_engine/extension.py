"""A stand-in for `transformer_engine_torch`, the C++ extension that Transformer Engine's Python is written on."""

import enum
from types import ModuleType
from typing import Any

from . import operators

NAME = "transformer_engine_torch"

# Enumerations whose members Transformer Engine looks up by name or by order.
_ENUMERATIONS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "CommOverlapType": "RS AG",
    "NVTE_Fused_Attn_Backend": "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
}
_OPERATORS = (
    operators.generic_gemm,
    operators.get_num_cublas_streams,
    operators.te_general_grouped_gemm,
    operators.rmsnorm_fwd,
    operators.rmsnorm_bwd,
    operators.layernorm_fwd,
    operators.layernorm_bwd,
)


class _AnyMember(type):
    """Of an enumeration that a CPU has no use for: every member is 0."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class StandIn(ModuleType):
    """The type of the module, which distinguishes it from the extension."""


def make() -> StandIn:
    """The module; what is neither an operator of ours nor an enumeration raises NotImplementedError when called."""
    module = StandIn(NAME)
    for name, members in _ENUMERATIONS.items():
        setattr(module, name, enum.IntEnum(name, members, start=0))
    for operator in _OPERATORS:
        setattr(module, operator.__name__, operator)

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _AnyMember(name, (), {}) if name[0].isupper() else _unavailable(name)
        setattr(module, name, found)
        return found

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


def _unavailable(name: str) -> Any:
    def unavailable(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{NAME}.{name} is a CUDA kernel that has no stand-in on a CPU")

    return unavailable
