"""Replacements of what ``megatron.core`` and ``megatron.training`` do only for a GPU."""

import contextlib
import functools
import logging
import sys

import torch

from ..ranks import is_rank_0, warn_on_rank_0

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
    told = set()  # a script may parse its arguments more than once

    def tell(line):
        if line not in told:
            told.add(line)
            warn_on_rank_0(_log, line)

    @functools.wraps(parse_args)
    def parse(*args, **kwargs):
        namespace = parse_args(*args, **kwargs)
        is_rehearsed = getattr(namespace, "dry_run", False)
        if is_rehearsed:
            namespace.replaced_on_cpu = {flag: getattr(namespace, flag) for flag, _, _ in FLAGS}
        for name, value, reason in FLAGS:
            asked = getattr(namespace, name)
            flag = f"--{name.replace('_', '-')}"
            if asked != value and was_given(flag) and not is_rehearsed:
                if name == "transformer_impl":
                    raise SystemExit(_NEEDS_GPU if is_rank_0() else 1)
                tell(f"{flag} {asked} becomes {value} on the CPU: {reason}")
            setattr(namespace, name, value)
        if namespace.flash_attention_version is not None and not is_rehearsed:
            tell("--flash-attention-version has no effect on the CPU: it names CUDA kernels")
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


_NEEDS_GPU = (
    "error: --transformer-impl transformer_engine: Transformer Engine's layers need a GPU; use --transformer-impl local"
)


def forked(get_write_results_queue):
    return functools.partial(get_write_results_queue, mp_mode="fork")


def newest_architecture():
    # Upstream demands CUDA_DEVICE_MAX_CONNECTIONS=1 for old GPUs.
    return 10


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


def loader_with_own_generator(build_data_loader):
    """A data loader whose workers' seed leaves alone the generator that dropout draws from.

    It is drawn when the loader starts: before the first step, but after a checkpoint is loaded.
    """

    @functools.wraps(build_data_loader)
    def build(*args, **kwargs):
        loader = build_data_loader(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.generator = torch.Generator()
        return loader

    return build


@contextlib.contextmanager
def fork(tracker, name="model-parallel-rng"):
    """``CudaRNGStatesTracker.fork``: run a block with the random state ``name`` of ``tracker``.

    Upstream's own warns each time that a fork draws from the CPU's generator, which here it must.
    """
    if name not in tracker.states_:
        raise KeyError(f"random state {name} was never added to the tracker")
    outer_name, outer_state = tracker._current_state_name, torch.get_rng_state()
    if outer_name in tracker.states_:
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        # A nested fork of the outer name has moved that state on.
        torch.set_rng_state(tracker.states_.get(outer_name, outer_state))
        tracker._current_state_name = outer_name
