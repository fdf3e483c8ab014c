"""Transformer Engine's Python layers on CPU tensors, without its C++ extension and without a GPU.

Its Python, the package `transformer-engine` alone (1.2 MB), holds all that distinguishes its layers from Megatron's
local ones: modules, autograd functions, fused accumulation of weight gradients, tensor parallelism. With the
operators of :mod:`.operators` in place of its CUDA kernels, the flags of a cluster's launch run on a laptop.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from ...patches import Patch, PatchTable, Scope, patched
from . import extension, layers

PACKAGE = "transformer_engine"


REDIRECTS = PatchTable(
    Scope.PROCESS,
    (
        Patch("torch.cuda.get_device_properties", layers.properties, "its layers choose kernels by them"),
        Patch("torch.cuda.get_device_capability", layers.capability, "its layers choose kernels by it"),
        Patch(
            f"{PACKAGE}.pytorch.module.base.TransformerEngineBaseModule.__init__",
            layers.made_without_gpu,
            "refuses to make a layer where no GPU is visible",
            wraps=True,
        ),
        Patch(
            f"{PACKAGE}.pytorch.module.base.TransformerEngineBaseModule.prepare_forward",
            layers.prepare_forward,
            "refuses CPU tensors",
        ),
        Patch(
            f"{PACKAGE}.pytorch.DotProductAttention.forward",
            layers.attend,
            "refuses CPU tensors by an assertion, without a way out",
        ),
        *(
            Patch(f"{PACKAGE}.pytorch.module.{name}.get_dummy_wgrad", layers.placeholder, "makes it on a GPU")
            for name in ("base", "linear", "layernorm_linear", "grouped_linear")
        ),
    ),
)


def is_wanted(argv: Sequence[str]) -> bool:
    """Whether the flags select Transformer Engine's layers, and its Python is installed to run them on a CPU."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--transformer-impl")
    return parser.parse_known_args(argv)[0].transformer_impl == PACKAGE and is_without_extension()


def is_without_extension() -> bool:
    """Whether Transformer Engine's Python is installed, and what it needs of CUDA is not."""
    return importlib.util.find_spec(PACKAGE) is not None and importlib.util.find_spec(extension.NAME) is None


def is_loaded() -> bool:
    """Whether Transformer Engine runs on the stand-in in this process."""
    return isinstance(sys.modules.get(extension.NAME), extension.StandIn)


def hide() -> None:
    """Hide Transformer Engine from Megatron, where importing it would fail."""
    sys.modules[PACKAGE] = None  # type: ignore[assignment]


def load() -> None:
    """Import Transformer Engine on the stand-in; to be called before Megatron is imported.

    Importing its package loads the CUDA libraries, so an empty package of the same name and path takes its place, from
    which its modules are imported as always.
    """
    patched(REDIRECTS._replace(patches=REDIRECTS.patches[:2]))
    sys.modules[extension.NAME] = extension.make()
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
    patched(REDIRECTS._replace(patches=REDIRECTS.patches[2:]))
    # Kernels have no fp64, in which equality is tested.
    constants = importlib.import_module(f"{PACKAGE}.pytorch.constants")
    constants.TE_DType[torch.float64] = torch.float64
    # Its optimizers are CUDA kernels; where they cannot be imported Megatron takes torch's.
    sys.modules[f"{PACKAGE}.pytorch.optimizers"] = None  # type: ignore[assignment]
