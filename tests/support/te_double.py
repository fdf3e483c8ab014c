"""Transformer Engine's Python layers on CPU tensors: a double of its C++ extension, `transformer_engine_torch`.

Its Python, the package `transformer-engine` alone (1.2 MB), has all that distinguishes its layers from Megatron's
local ones: modules, autograd functions, fused accumulation of weight gradients, tensor parallelism. The operators of
te_operators.py take the place of its CUDA kernels.
"""

import enum
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from megatron.seq1f1b.platform import stand_ins
from megatron.seq1f1b.process.patches import Patch, patched
from support import te_operators

PACKAGE = "transformer_engine"
EXTENSION = "transformer_engine_torch"
# Enumerations of the extension whose members Transformer Engine compares with its own.
_COMPARED = {
    "DType": [*te_operators.DTYPES, "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"],
    "NVTE_Fused_Attn_Backend": ["NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend"],
}


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
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    package.__file__ = spec.origin
    package.__version__ = importlib.metadata.version(PACKAGE)
    sys.modules[PACKAGE] = package
    # With this name set, Transformer Engine does not look for its core library.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    package.common = importlib.import_module(f"{PACKAGE}.common")
    del os.environ["NVTE_PROJECT_BUILDING"]
    package.common.load_framework_extension = lambda framework: None
    package.pytorch = importlib.import_module(f"{PACKAGE}.pytorch")
    patched(_OF_ITS_LAYERS)
    # These would take Megatron's local layers.
    local = ("transformer_impl", "gradient_accumulation_fusion")
    stand_ins.FLAGS = tuple(row for row in stand_ins.FLAGS if row[0] not in local)
    # Kernels have no fp64, in which equality is tested.
    constants = importlib.import_module(f"{PACKAGE}.pytorch.constants")
    constants.TE_DType[torch.float64] = torch.float64
    # Its optimizers are CUDA kernels; where they cannot be imported Megatron takes torch's.
    sys.modules[f"{PACKAGE}.pytorch.optimizers"] = None  # type: ignore[assignment]


def _extension() -> ModuleType:
    """The module; what is neither of te_operators.py nor a class or enumeration is an error when it is called."""
    module: Any = ModuleType(EXTENSION)
    module.__spec__ = ModuleSpec(EXTENSION, None)
    vars(module).update(inspect.getmembers(te_operators, inspect.isfunction))
    for name, members in _COMPARED.items():
        setattr(module, name, enum.IntEnum(name, members, start=0))

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        problem = NotImplementedError(f"{EXTENSION}.{name} is a CUDA kernel that has no double")
        setattr(module, name, mock.MagicMock() if name[0].isupper() else mock.Mock(side_effect=problem))
        return getattr(module, name)

    module.__getattr__ = missing
    return module


class _Hopper:
    """Properties of a GPU, by which the layers choose kernels and sizes of buffers that a CPU has no use for."""

    name = "CPU"
    major = 9
    minor = 0
    multi_processor_count = 1
    total_memory = 80 << 30


_CHOOSE = "its layers choose kernels by it"
_OF_TORCH = (
    Patch("torch.cuda.get_device_properties", lambda device=None: _Hopper, _CHOOSE),
    Patch("torch.cuda.get_device_capability", lambda device=None: (_Hopper.major, _Hopper.minor), _CHOOSE),
)
_BASE = f"{PACKAGE}.pytorch.module.base.TransformerEngineBaseModule"
_OF_ITS_LAYERS = (
    # It requires a visible GPU and then does not use it.
    Patch(f"{_BASE}.__init__", mock.patch("torch.cuda.is_available", lambda: True), "refuses CPUs", wraps=True),
    Patch(f"{_BASE}.prepare_forward", mock.patch("torch.Tensor.is_cuda", True), "refuses CPU tensors", wraps=True),
)
