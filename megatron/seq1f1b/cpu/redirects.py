"""The table of everything that training on a CPU redirects, in torch and in Megatron."""

import importlib
import os

import torch

from megatron.seq1f1b.cpu import gloo, optimizer, recurrent, rng, stand_ins, tensors, transformer_engine, upstream
from megatron.seq1f1b.patches import Patch, PatchTable, Scope, patched

_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)

_NO_DEVICE = "there is no CUDA device"
_DONE = "CPU work is finished when the call returns"
_MEMORY = "reports the memory of the process"
_RANDOM = "CPU tensors draw from the CPU's generator"
_INITIALIZE = "asserts CUDA by default"
_TRITON = "its kernels are for GPUs only"

# torch comes first: importing megatron.core already uses some of it.
REDIRECTS = PatchTable(
    Scope.PROCESS,
    (
        # The device
        Patch("torch.cuda.is_available", stand_ins.no, "a visible GPU is not to be used"),
        Patch("torch.cuda.device_count", stand_ins.one_device, "process groups are made if > 0"),
        Patch("torch.cuda.current_device", stand_ins.current_device, _NO_DEVICE),
        Patch("torch.cuda.set_device", stand_ins.nothing, _NO_DEVICE),
        Patch(
            "torch.distributed.distributed_c10d.ProcessGroupGloo",
            gloo.on_one_device,
            "each group would poll its sockets in a thread of its own",
            wraps=True,
        ),
        # Streams and events
        Patch("torch.cuda.Stream", stand_ins.Stream, _DONE),
        Patch("torch.cuda.Event", stand_ins.Event, _DONE),
        Patch("torch.cuda.stream", stand_ins.stream, _DONE),
        Patch("torch.cuda.current_stream", stand_ins.current_stream, _DONE),
        Patch("torch.cuda.default_stream", stand_ins.current_stream, _DONE),
        Patch("torch.cuda.set_stream", stand_ins.nothing, _DONE),
        Patch("torch.cuda.synchronize", stand_ins.nothing, _DONE),
        Patch("torch.cuda.is_current_stream_capturing", stand_ins.no, "no CUDA graphs"),
        # Memory
        Patch("torch.cuda.memory_allocated", stand_ins.resident_bytes, _MEMORY),
        Patch("torch.cuda.memory_reserved", stand_ins.resident_bytes, _MEMORY),
        Patch("torch.cuda.max_memory_allocated", stand_ins.peak_resident_bytes, _MEMORY),
        Patch("torch.cuda.max_memory_reserved", stand_ins.peak_resident_bytes, _MEMORY),
        Patch("torch.cuda.device_memory_used", stand_ins.resident_bytes, _MEMORY),
        Patch("torch.cuda.memory_stats", stand_ins.memory_stats, _MEMORY),
        Patch("torch.cuda.empty_cache", stand_ins.nothing, "there is no cache to empty"),
        # Random numbers
        Patch("torch.cuda.get_rng_state", rng.get_state, _RANDOM),
        Patch("torch.cuda.set_rng_state", rng.set_state, _RANDOM),
        Patch("torch.cuda.manual_seed", rng.seed, _RANDOM),
        # Tensors
        *(
            Patch(f"torch.{name}", tensors.made_on_cpu, "upstream writes device='cuda'", wraps=True)
            for name in _FACTORIES
        ),
        Patch("torch.Tensor.cuda", tensors.stay, "the CPU is where it belongs"),
        Patch(
            "torch.Tensor.type",
            tensors.cuda_type_name,
            "optimizers and clipping compare with 'torch.cuda.FloatTensor'",
            wraps=True,
        ),
        Patch(
            "torch.compile",
            upstream.not_compiled,
            "fused element-wise kernels save nothing here, and compiling takes minutes",
        ),
        # Megatron
        Patch("megatron.core.tensor_parallel.random._get_cuda_rng_state", rng.get_state, _RANDOM),
        Patch("megatron.core.tensor_parallel.random._set_cuda_rng_state", rng.set_state, _RANDOM),
        Patch(
            "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork",
            rng.fork,
            "warns when the CPU's generator moves, as here it must",
        ),
        Patch(
            "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__",
            upstream.torch_norm,
            "refuses sequence parallelism, since its parameters have no mark",
            wraps=True,
        ),
        Patch(
            "megatron.core.transformer.dot_product_attention.DotProductAttention.__init__",
            upstream.sized_for_latent_attention,
            "refuses the head sizes that multi-latent attention passes",
            wraps=True,
        ),
        Patch(
            "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
            upstream.on_cpu,
            "hands tensors on as split sizes, which all-to-all does not take",
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict",
            optimizer.state_dict_before_first_step,
            "without Apex, fails when a checkpoint is to be loaded",
            wraps=True,
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
            optimizer.load_with_steps,
            "without Apex, lets parameters share one step counter; in fp32, needs no_grad",
            wraps=True,
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
            optimizer.set_all_but_steps,
            "without Apex, overwrites the number of steps or looks for it in vain",
            wraps=True,
        ),
        Patch(
            "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
            upstream.forked,
            "the first save would start a Python that imports Megatron again, which fork avoids",
            wraps=True,
        ),
        Patch(
            "megatron.training.training.build_pretraining_data_loader",
            rng.loader_with_own_generator,
            "starting it would move the generator that dropout draws from",
            wraps=True,
        ),
        Patch(
            "megatron.training.arguments.parse_args",
            upstream.with_cpu_defaults,
            "its defaults name NCCL and CUDA kernels",
            wraps=True,
        ),
        Patch(
            "megatron.training.arguments.get_device_arch_version",
            upstream.newest_architecture,
            _NO_DEVICE,
        ),
        # Recurrent layers, and the hybrid models that have them
        Patch("megatron.core.ssm.gated_delta_net.common.HAVE_FLA", recurrent.there, _TRITON, wraps=True),
        Patch("megatron.core.ssm.gated_delta_net.common.l2norm", recurrent.l2norm, _TRITON),
        Patch("megatron.core.ssm.gated_delta_net.gdn.causal_conv1d", recurrent.causal_conv1d, _TRITON),
        Patch(
            "megatron.core.ssm.gated_delta_net.gdn.chunk_gated_delta_rule",
            recurrent.chunk_gated_delta_rule,
            _TRITON,
        ),
        Patch("megatron.core.ssm.mamba_mixer.HAVE_MAMBA_SSM", recurrent.there, _TRITON, wraps=True),
        Patch("megatron.core.ssm.mamba_mixer.ExtendedRMSNorm", recurrent.gated_norm, _TRITON, wraps=True),
        Patch("megatron.core.ssm.mamba_mixer.causal_conv1d_fn", recurrent.causal_conv1d_fn, _TRITON),
        Patch(
            "megatron.core.ssm.mamba_mixer.mamba_chunk_scan_combined",
            recurrent.mamba_chunk_scan_combined,
            _TRITON,
        ),
        Patch(
            "megatron.core.ssm.mamba_mixer.mamba_split_conv1d_scan_combined",
            recurrent.mamba_split_conv1d_scan_combined,
            _TRITON,
        ),
        Patch(
            "megatron.training.models.hybrid.HybridModelBuilder.build_model",
            upstream.from_local_layers,
            "its layers are Transformer Engine's unless a specification is given",
            wraps=True,
        ),
        # One function, bound in three places by `from … import`
        Patch(
            "megatron.training.initialize.initialize_megatron",
            upstream.without_cuda,
            _INITIALIZE,
            wraps=True,
        ),
        Patch(
            "megatron.training.training.initialize_megatron",
            upstream.without_cuda,
            _INITIALIZE,
            wraps=True,
        ),
        Patch("megatron.training.initialize_megatron", upstream.without_cuda, _INITIALIZE, wraps=True),
    ),
)


def is_active() -> bool:
    """Whether :func:`apply` was called in this process."""
    return torch.cuda.current_device is stand_ins.current_device


def apply(with_transformer_engine: bool = False) -> None:
    """Bind every name of the table to its replacement; once."""
    if is_active():
        return
    # Hides a GPU from the parts of torch that call the driver and not `torch.cuda`.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Both keep functions of torch when first used, which must be the real ones.
    importlib.import_module("torch._dynamo")  # torch's optimizers import it in any case
    with torch.device("cpu"):
        torch.empty(0)
    of_torch = [patch for patch in REDIRECTS.patches if patch.target.startswith("torch.")]
    patched(REDIRECTS._replace(patches=tuple(of_torch)))
    # Between torch, which it uses, and Megatron, which looks for it when it is imported.
    if with_transformer_engine:
        transformer_engine.load()
    elif transformer_engine.is_without_extension():
        transformer_engine.hide()
    patched(REDIRECTS._replace(patches=REDIRECTS.patches[len(of_torch) :]))
