"""Replacements of what ``megatron.core`` and ``megatron.training`` do only for a GPU."""

import functools
import logging
import sys

from ..ranks import warn_on_rank_0
from . import transformer_engine

_log = logging.getLogger(__name__)


def not_compiled(function=None, **options):
    """``torch.compile`` that leaves the function as it is."""
    return function if function is not None else not_compiled


def without_cuda(initialize_megatron):
    return functools.partial(initialize_megatron, allow_no_cuda=True)


def with_cpu_defaults(parse_args):
    """``parse_args``, with the kernels and backends in its result that a CPU has.

    In a rehearsal the replaced values, those for a GPU, stay in its ``replaced_on_cpu``.
    """

    @functools.wraps(parse_args)
    def parse(*args, **kwargs):
        namespace = parse_args(*args, **kwargs)
        is_rehearsed = getattr(namespace, "dry_run", False)
        if is_rehearsed:
            namespace.replaced_on_cpu = {flag: getattr(namespace, flag) for flag, _, _ in FLAGS}
        for name, value, reason in FLAGS:
            if name in _OF_TRANSFORMER_ENGINE and transformer_engine.is_loaded():
                continue
            asked = getattr(namespace, name)
            flag = f"--{name.replace('_', '-')}"
            if asked != value and was_given(flag) and not is_rehearsed:
                warn_on_rank_0(_log, f"{flag} {asked} becomes {value} on the CPU: {reason}")
            setattr(namespace, name, value)
        if namespace.flash_attention_version is not None and not is_rehearsed:
            warn_on_rank_0(_log, "--flash-attention-version has no effect on the CPU: it names CUDA kernels")
        return namespace

    return parse


def was_given(flag):
    """Whether the command line names a flag, other than a default."""
    return any(word == flag or word.startswith(f"{flag}=") for word in sys.argv[1:])


# (attribute of the parsed arguments, value on a CPU, reason). They are defaults that upstream
# takes for a GPU; their flags need not be given.
FLAGS = (
    ("distributed_backend", "gloo", "NCCL moves CUDA tensors only"),
    ("transformer_impl", "local", "Transformer Engine has CUDA kernels only"),
    ("gradient_accumulation_fusion", False, "a CUDA kernel of Apex"),
    ("no_persist_layer_norm", True, "a CUDA kernel of Apex"),
    ("masked_softmax_fusion", False, "a CUDA kernel of Apex"),
    ("apply_rope_fusion", False, "a kernel of Transformer Engine"),
    ("ddp_average_in_collective", False, "gloo sums only; the same mean is taken before the sum"),
)


# What its layers on CPU tensors can do.
_OF_TRANSFORMER_ENGINE = ("transformer_impl", "gradient_accumulation_fusion")


def forked(get_write_results_queue):
    return functools.partial(get_write_results_queue, mp_mode="fork")


def newest_architecture():
    # Upstream demands CUDA_DEVICE_MAX_CONNECTIONS=1 for old GPUs.
    return 10


def torch_norm(new):
    """``WrappedTorchNorm``, that serves sequence parallelism too.

    The gradient of a norm's parameters must then be summed over the tensor-parallel ranks;
    upstream does that for each parameter that carries this mark.
    """

    @functools.wraps(new)
    def build(cls, config, hidden_size, *args, **kwargs):
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False  # upstream refuses it, since nothing sets the mark
        try:
            norm = new(cls, config, hidden_size, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    return build


def sized_for_latent_attention(init):
    """``DotProductAttention.__init__``, that takes the head sizes of keys and values.

    Multi-latent attention passes them to every attention; upstream's own, the only one without
    CUDA kernels, could compute with them but has no such parameters.
    """

    @functools.wraps(init)
    def initialize(attention, *args, k_channels=None, v_channels=None, **kwargs):
        init(attention, *args, **kwargs)
        if v_channels is not None:
            heads = attention.num_attention_heads_per_partition
            attention.hidden_size_per_partition = heads * v_channels

    return initialize


def on_cpu(tensor, as_numpy=False, record_stream=False):
    """``maybe_move_tensor_to_cpu``, which forgets ``as_numpy`` where there is nothing to move."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def from_local_layers(build_model):
    """``HybridModelBuilder.build_model``, of Megatron's own layers where no others are specified."""

    @functools.wraps(build_model)
    def build(self, *args, **kwargs):
        from megatron.seq1f1b.local_hybrid import local_hybrid_spec

        config = self._model_config
        if config.hybrid_stack_spec is None:
            config.hybrid_stack_spec = local_hybrid_spec(config.transformer)
        return build_model(self, *args, **kwargs)

    return build
