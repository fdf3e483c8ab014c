"""The table of all that training on a CPU redirects, in torch and in Megatron. Each reason ends with the errors of a
GPU that the redirect hides, and where these are covered.

Tested in functional_tests/test_cpu_activation.py by test_redirects_are_for_cpus_and_repairs_for_gpus_too.
"""

import importlib
import logging
import os
import sys

import torch

from ..process.patches import Patch, patched, wrapping
from . import recurrent, stand_ins

# Packages whose kernels are for GPUs; one that is imported already stays, as a double in a test.
KERNEL_PACKAGES = ("transformer_engine", "apex")

# Functions of torch that make tensors.
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
    "empty_like",
    "full_like",
    "ones_like",
    "rand_like",
    "randn_like",
    "zeros_like",
)

_NOW = "memory_allocated", "memory_reserved", "device_memory_used"
_WAITS = "set_stream", "synchronize"
_TRAINING = "megatron.training"
_RNG = "megatron.core.tensor_parallel.random"
_PARSING = f"{_TRAINING}.arguments"
_EXPERTS = "megatron.core.transformer.moe.token_dispatcher"

_NO_DEVICE = "there is no CUDA device; hides nothing that shapes a step"
# Waits within a step never end behind a posted receive, so --timing-log-level 2 and CUDA_LAUNCH_BLOCKING are refused
# with NCCL.
_DONE = "CPU work is finished when the call returns; hides waits, and reads that do not wait for a stream (GPU suite)"
_MEMORY = "reports the memory of the process; hides fragmentation, and an allocator that waits for the device when full"
_RANDOM = "CPU tensors draw from the CPU's generator; hides nothing, since states are saved and restored alike"
_MADE = "upstream writes device='cuda'; hides tensors on the wrong device (rehearsals run on fake CUDA tensors)"
_INITIALIZE = "asserts CUDA by default; hides nothing"
_TRITON = "its kernels are for GPUs only; hides their versions and bugs (checked at start-up)"
_GLOO = "each group would poll its sockets in a thread of its own; hides nothing"
# The first step with segments of new lengths has no message under way while kernels are compiled and loaded.
_COMPILED = "compiling takes minutes and saves nothing here; hides kernels that are made at their first use"
_SCRIPTED = "its compiler knows none of the functions that make tensors here; hides what it does not compile"
_SIZES = "passes tensors as split sizes to all-to-all; hides a wait of the host in each layer of experts (GPU suite)"
_SEED = "starting it would move the generator that dropout draws from; hides nothing: a GPU has its own"
_DEFAULTS = "its defaults name NCCL and CUDA kernels; hides NCCL's order of messages (simulated) and fused kernels"
_QUEUES = "there is no CUDA device; hides that Megatron demands one hardware queue before Blackwell (launchers' test)"
_GROUPED = "--moe-grouped-gemm asks for it; hides GPUs before Ampere, and grouped kernels (experts run one by one here)"
_LAYERS = "its layers are Transformer Engine's unless --spec names others; hides those (a double tests them)"

# torch comes first: importing megatron.core already uses some of it.
REDIRECTS = (
    # The device
    Patch("torch.cuda.is_available", stand_ins.no, "a visible GPU is not to be used; hides branches for GPUs"),
    Patch("torch.cuda.device_count", stand_ins.device_count, "process groups are made if > 0; hides nothing"),
    Patch("torch.cuda.current_device", stand_ins.current_device, _NO_DEVICE),
    Patch("torch.cuda.set_device", stand_ins.nothing, _NO_DEVICE),
    Patch("torch.cuda.get_device_capability", stand_ins.device_capability, _GROUPED),
    Patch("torch.distributed.distributed_c10d.ProcessGroupGloo", stand_ins.on_one_device, _GLOO, wraps=True),
    # Streams and events
    Patch("torch.cuda.Stream", stand_ins.Stream, _DONE),
    Patch("torch.cuda.Event", stand_ins.Event, _DONE),
    Patch("torch.cuda.stream", stand_ins.stream, _DONE),
    Patch("torch.Tensor.record_stream", stand_ins.nothing, _DONE),
    *(Patch(f"torch.cuda.{name}_stream", stand_ins.Stream, _DONE) for name in ("current", "default")),
    *(Patch(f"torch.cuda.{name}", stand_ins.nothing, _DONE) for name in _WAITS),
    Patch("torch.cuda.is_current_stream_capturing", stand_ins.no, "no CUDA graphs, which are refused"),
    # Memory
    *(Patch(f"torch.cuda.{name}", stand_ins.resident_bytes, _MEMORY) for name in _NOW),
    *(Patch(f"torch.cuda.max_{name}", stand_ins.peak_resident_bytes, _MEMORY) for name in _NOW[:2]),
    Patch("torch.cuda.reset_peak_memory_stats", stand_ins.forget_peak, _MEMORY),
    Patch("torch.cuda.memory_stats", stand_ins.memory_stats, _MEMORY),
    Patch("torch.cuda.empty_cache", stand_ins.nothing, "there is no cache to empty; hides nothing"),
    # Random numbers
    Patch("torch.cuda.get_rng_state", stand_ins.get_rng_state, _RANDOM),
    Patch("torch.cuda.set_rng_state", stand_ins.set_rng_state, _RANDOM),
    Patch("torch.cuda.manual_seed", stand_ins.manual_seed, _RANDOM),
    # Tensors
    *(Patch(f"torch.{name}", stand_ins.made_on_cpu, _MADE, wraps=True) for name in _FACTORIES),
    Patch("torch.Tensor.cuda", lambda tensor, *_, **__: tensor, _MADE),
    wrapping("torch.Tensor.type", stand_ins.cuda_type_name, "clipping compares with torch.cuda names; hides nothing"),
    Patch("torch.compile", stand_ins.not_compiled, _COMPILED),
    Patch("torch.jit.script", stand_ins.not_scripted, _SCRIPTED),
    # Megatron
    Patch(f"{_RNG}._get_cuda_rng_state", stand_ins.get_rng_state, _RANDOM),
    Patch(f"{_RNG}._set_cuda_rng_state", stand_ins.set_rng_state, _RANDOM),
    Patch(f"{_EXPERTS}.maybe_move_tensor_to_cpu", stand_ins.on_cpu, _SIZES),
    wrapping(f"{_TRAINING}.training.build_pretraining_data_loader", stand_ins.build_loader_with_own_generator, _SEED),
    wrapping(f"{_PARSING}.parse_args", stand_ins.parse_with_cpu_defaults, _DEFAULTS),
    Patch(f"{_PARSING}.get_device_arch_version", stand_ins.device_arch_version, _QUEUES),
    # Recurrent layers, and the hybrid models that have them
    *(Patch(f"megatron.core.ssm.{name}", new, _TRITON) for name, new in recurrent.KERNELS.items()),
    wrapping(f"{_TRAINING}.models.hybrid.HybridModelBuilder.build_model", stand_ins.build_from_local_layers, _LAYERS),
    # One function, bound in three places by `from … import`
    *(
        wrapping(
            f"{_TRAINING}{module}.initialize_megatron",
            lambda initialize, *args, **kwargs: initialize(*args, **{"allow_no_cuda": True} | kwargs),
            _INITIALIZE,
        )
        for module in (".initialize", ".training", "")
    ),
)


def apply() -> None:
    """Bind every name of the table to its replacement, and apply the repairs for a missing Transformer Engine."""
    # Hides a GPU from the parts of torch that call the driver and not `torch.cuda`.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Both store functions of torch at their first use, which must be the real ones.
    importlib.import_module("torch._dynamo")  # torch's optimizers import it in any case
    with torch.device("cpu"):
        torch.empty(0)
    of_torch = [patch for patch in REDIRECTS if patch.target.startswith("torch.")]
    patched(of_torch)
    # Megatron takes the layers and optimizers of these wherever it can import them, as in a container for GPUs.
    for package in KERNEL_PACKAGES:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # importing it fails from now on
    patched(REDIRECTS[len(of_torch) :])
    # Megatron warns whenever the CPU's generator moves between forks, as it must here.
    logging.getLogger(_RNG).addFilter(lambda record: "CPU RNG" not in record.msg)
    from .without_te import repairs  # imports Megatron

    patched(repairs())
