"""Transformer Engine's Python layers on CPU tensors: a double of its C++ extension, `transformer_engine_torch`.

Its Python, the package `transformer-engine` alone (1.2 MB), has all that distinguishes its layers from Megatron's
local ones: modules, autograd functions, fused accumulation of weight gradients, tensor parallelism. The operators of
te_operators.py take the place of its CUDA kernels.
"""

import enum
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron.seq1f1b.process.patches import Patch, patched
from support import te_operators

PACKAGE, EXTENSION = "transformer_engine", "transformer_engine_torch"

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
    te_operators.generic_gemm,
    te_operators.get_num_cublas_streams,
    te_operators.te_general_grouped_gemm,
    te_operators.rmsnorm_fwd,
    te_operators.rmsnorm_bwd,
    te_operators.layernorm_fwd,
    te_operators.layernorm_bwd,
)


def load() -> None:
    """Import Transformer Engine on the double; to be called before `cpu.activate` and before Megatron is imported.

    Importing its package loads the CUDA libraries, so an empty package of the same name and path takes its place, from
    which its modules are imported as always. From then on `--transformer-impl transformer_engine` trains on a CPU.
    """
    patched(_OF_TORCH)
    sys.modules[EXTENSION] = _extension()
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    package: Any = ModuleType(PACKAGE)
    package.__path__, package.__spec__, package.__file__ = list(spec.submodule_search_locations), spec, spec.origin
    package.__version__ = importlib.metadata.version(PACKAGE)
    sys.modules[PACKAGE] = package
    # With this name set, Transformer Engine does not look for its core library.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    package.common = importlib.import_module(f"{PACKAGE}.common")
    del os.environ["NVTE_PROJECT_BUILDING"]
    package.common.load_framework_extension = lambda framework: None
    package.pytorch = importlib.import_module(f"{PACKAGE}.pytorch")
    patched(_OF_ITS_LAYERS)
    # Kernels have no fp64, in which equality is tested.
    constants = importlib.import_module(f"{PACKAGE}.pytorch.constants")
    constants.TE_DType[torch.float64] = torch.float64
    # Its optimizers are CUDA kernels; where they cannot be imported Megatron takes torch's.
    sys.modules[f"{PACKAGE}.pytorch.optimizers"] = None  # type: ignore[assignment]


class _AnyMember(type):
    """An enumeration that a CPU has no use for: every member is 0."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


def _extension() -> ModuleType:
    """The module; what is neither an operator nor an enumeration of ours raises NotImplementedError when called."""
    module = ModuleType(EXTENSION)
    module.__spec__ = ModuleSpec(EXTENSION, None)
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


def _unavailable(name: str) -> Callable[..., None]:
    def unavailable(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{EXTENSION}.{name} is a CUDA kernel that has no double")

    return unavailable


def _made_without_gpu(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a layer, which requires a visible GPU and then does not use it."""

    @functools.wraps(init)
    def initialize(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        is_available = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            init(layer, *args, **kwargs)
        finally:
            torch.cuda.is_available = is_available

    return initialize


def _prepare_forward(
    layer: Any,
    inp: Tensor,
    num_gemms: int = 1,
    allow_non_contiguous: bool = False,
    allow_different_data_and_param_types: bool = False,
) -> Tensor:
    """The part of a layer's `prepare_forward` that is not about fp8 and does not refuse CPU tensors."""
    layer.fast_setattr("allow_different_data_and_param_types", allow_different_data_and_param_types)
    layer.fast_setattr("forwarded_at_least_once", True)
    layer.set_activation_dtype(inp)
    layer.init_fp8_metadata(num_gemms=num_gemms)
    return inp if allow_non_contiguous else inp.contiguous()


def _attend(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("Transformer Engine's attention has CUDA kernels that have no double")


def _placeholder(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What a layer returns as the gradient of a weight whose `main_grad` it has written."""
    return torch.zeros(shape, dtype=dtype)


class _Hopper:
    """Properties of a GPU, by which the layers choose kernels and sizes of buffers that a CPU has no use for."""

    name = "CPU"
    major, minor = 9, 0
    multi_processor_count = 1
    total_memory = 80 << 30


_CHOOSE = "its layers choose kernels by it"
_OF_TORCH = (
    Patch("torch.cuda.get_device_properties", lambda device=None: _Hopper, _CHOOSE),
    Patch("torch.cuda.get_device_capability", lambda device=None: (_Hopper.major, _Hopper.minor), _CHOOSE),
)
_BASE = f"{PACKAGE}.pytorch.module.base.TransformerEngineBaseModule"
_OF_ITS_LAYERS = (
    Patch(f"{_BASE}.__init__", _made_without_gpu, "refuses to make a layer where no GPU is visible", wraps=True),
    Patch(f"{_BASE}.prepare_forward", _prepare_forward, "refuses CPU tensors"),
    Patch(f"{PACKAGE}.pytorch.DotProductAttention.forward", _attend, "refuses CPU tensors by an assertion"),
    *(
        Patch(f"{PACKAGE}.pytorch.module.{name}.get_dummy_wgrad", _placeholder, "makes it on a GPU")
        for name in ("base", "linear", "layernorm_linear", "grouped_linear")
    ),
    Patch(
        "megatron.seq1f1b.cpu.stand_ins.FLAGS",
        lambda flags: tuple(row for row in flags if row[0] not in ("transformer_impl", "gradient_accumulation_fusion")),
        "takes Megatron's local layers",
        wraps=True,
    ),
)
