"""Replacements for GPU-only code of `megatron.core` and `megatron.training`."""

import functools
import logging
import sys

import torch

from ..process.ranks import warn_on_rank_0

_log = logging.getLogger(__name__)
_tell_once = functools.cache(functools.partial(warn_on_rank_0, _log))  # a script may parse its arguments repeatedly

# (attribute of the parsed arguments, value on a CPU, reason). Upstream's defaults are for a GPU.
FLAGS = (
    ("distributed_backend", "gloo", "NCCL moves CUDA tensors only"),
    ("transformer_impl", "local", "Transformer Engine has CUDA kernels only"),
    ("gradient_accumulation_fusion", False, "a CUDA kernel of Apex"),
    ("no_persist_layer_norm", True, "a CUDA kernel of Apex"),
    ("masked_softmax_fusion", False, "a CUDA kernel of Apex"),
    ("apply_rope_fusion", False, "a kernel of Transformer Engine"),
    ("moe_permute_fusion", False, "a kernel of Transformer Engine"),
    ("moe_router_fusion", False, "a kernel of Transformer Engine"),
    ("ddp_average_in_collective", False, "gloo sums only; the same mean is taken before the sum"),
)


def parse_with_cpu_defaults(parse_args, *args, **kwargs):
    """`parse_args` with kernels and backends in its result that exist on a CPU.

    In a rehearsal, `replaced_on_cpu` of the result keeps the replaced values, those for a GPU.
    """
    namespace = parse_args(*args, **kwargs)
    if getattr(namespace, "dry_run", False):
        namespace.replaced_on_cpu = {flag: getattr(namespace, flag) for flag, _, _ in FLAGS}
    else:
        _tell_what_changes(namespace)
    vars(namespace).update({name: value for name, value, _ in FLAGS})
    return namespace


def _tell_what_changes(namespace):
    for name, value, reason in FLAGS:
        asked, flag = getattr(namespace, name), f"--{name.replace('_', '-')}"
        is_given = any(word == flag or word.startswith(f"{flag}=") for word in sys.argv[1:])
        if asked != value and is_given:
            if name == "transformer_impl":
                raise ValueError(f"{flag} {asked} needs a GPU: {reason}; use {flag} {value}")
            _tell_once(f"{flag} {asked} becomes {value} on the CPU: {reason}")
    if namespace.profile and not namespace.use_pytorch_profiler:  # ends the program at --profile-step-start
        raise ValueError("--profile marks steps for Nsight, which needs a GPU; add --use-pytorch-profiler, or drop it")


def not_compiled(function=None, **options):
    """`torch.compile` that leaves the function as it is."""
    return function if function is not None else not_compiled


def initialize_without_cuda(initialize_megatron, *args, **kwargs):
    return initialize_megatron(*args, **{"allow_no_cuda": True} | kwargs)


def queue_of_forks(get_write_results_queue):
    # `mp_mode` is set as a default: other patches look that up, and start the process themselves.
    return functools.partial(get_write_results_queue, mp_mode="fork")


def on_cpu(tensor, as_numpy=False, record_stream=False):
    """`maybe_move_tensor_to_cpu`; upstream's ignores `as_numpy` if there is nothing to move."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def build_from_local_layers(build_model, self, *args, **kwargs):
    """`HybridModelBuilder.build_model` with Megatron's local layers in place of Transformer Engine's.

    It replaces Transformer Engine's layers only, the default and the usual --spec; any other specification stays.
    """
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    from megatron.seq1f1b.model.local_hybrid import local_hybrid_spec

    config = self._model_config
    if config.hybrid_stack_spec is None or config.hybrid_stack_spec is hybrid_stack_spec:
        config.hybrid_stack_spec = local_hybrid_spec(config.transformer)
    return build_model(self, *args, **kwargs)


def build_loader_with_own_generator(build_data_loader, *args, **kwargs):
    """A data loader that draws the seed of its workers from a generator of its own, not from that of dropout.

    The seed is drawn when the loader starts: before the first step, but after a checkpoint is loaded.
    """
    loader = build_data_loader(*args, **kwargs)
    if isinstance(loader, torch.utils.data.DataLoader):
        loader.generator = torch.Generator()
    return loader
