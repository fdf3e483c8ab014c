"""Replacements for GPU-only functions of torch, `megatron.core` and `megatron.training`.

Other versions than the pinned ones may pass arguments that these do not know, so they take any, and ignore what has no
meaning on a CPU.
"""

import contextlib
import ctypes
import functools
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from ..process.flag_names import flag_of
from ..process.ranks import warn_on_rank_0

_CLEAR_REFS = Path("/proc/self/clear_refs")
_tell_once = functools.cache(warn_on_rank_0)  # scripts may parse twice


def nothing(*args, **kwargs):
    return None


def no(*args, **kwargs):
    return False


class Stream:
    """A stream on which everything is already done."""

    __init__ = nothing
    synchronize = nothing
    wait_event = nothing
    wait_stream = nothing

    def query(self, *args, **kwargs):
        return True

    def record_event(self, event=None, **kwargs):
        event = event or Event()
        event.record()
        return event


class Event:
    """The moment at which it was recorded, in milliseconds."""

    synchronize = nothing
    wait = nothing
    query = Stream.query

    def __init__(self, *args, **kwargs):
        self._moment = 0.0

    def record(self, *args, **kwargs):
        self._moment = time.perf_counter() * 1e3

    def elapsed_time(self, end_event, **kwargs):
        return end_event._moment - self._moment


def stream(*args, **kwargs):
    return contextlib.nullcontext()


def device_count(*args, **kwargs):
    return torch.cpu.device_count()


def current_device(*args, **kwargs):
    return torch.device("cpu")  # not an index: callers pass it on as `device=`


def resident_bytes(*args, **kwargs):
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS
        return peak_resident_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes(*args, **kwargs):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, and updates the peak only now and then.
    return peak if sys.platform == "darwin" else max(peak * 1024, resident_bytes())


def forget_peak(*args, **kwargs):
    """Count the peak from now on (Linux); freed pages go back to the system first, so that their next use counts."""
    if _CLEAR_REFS.exists():
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")  # see proc(5)


def memory_stats(*args, **kwargs):
    stats = {"allocation.all.current": 0}
    for kind in ("allocated_bytes.all", "reserved_bytes.all"):
        stats[f"{kind}.current"] = resident_bytes()
        stats[f"{kind}.peak"] = peak_resident_bytes()
    return stats


def get_rng_state(*args, **kwargs):
    return torch.get_rng_state()


def set_rng_state(new_state, *args, **kwargs):
    torch.set_rng_state(new_state)


def manual_seed(seed, *args, **kwargs):
    torch.default_generator.manual_seed(seed)


def made_on_cpu(factory):
    """`factory` (`torch.zeros`, say), with a CUDA `device` read as the CPU, and nothing pinned for it."""

    @functools.wraps(factory)
    def create(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = "cpu"
        if kwargs.get("out") is not None:  # it has a device: in a rehearsal, that of tensors without values
            kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def cuda_type_name(type_method, tensor, dtype=None, *args, **kwargs):
    """`Tensor.type` with the names that upstream's checks expect, also for tensors without values."""
    if dtype is None:
        return f"torch.cuda.{type_method(tensor).rpartition('.')[2]}"
    return type_method(tensor, dtype, *args, **kwargs)


def on_one_device(gloo: Any) -> type:
    """The class of gloo's groups, which share the devices of a process: torch makes a polling thread for each group,
    and the 60 of two ranks of Megatron's take a fifth of a core. A group's collectives run in one thread: in torch's
    two, they corrupt the heap if they end at once (`lastCompletedWorkName` in ProcessGroupGloo.cpp of PyTorch 2.13)."""

    class OnOneDevice(gloo):
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta = default_pg_timeout, **others: object
        ) -> None:
            options = gloo._Options()
            options._timeout = timeout
            for name, value in others.items():  # PyTorch 2.15 has one: enable_reconfigure
                if hasattr(options, name):
                    setattr(options, name, value)
            options._devices = _devices_of(os.getpid())
            options._threads = 1
            super().__init__(store, rank, size, options)

    return OnOneDevice


@functools.cache
def _devices_of(process):
    """The devices that torch would make for a group, by GLOO_SOCKET_IFNAME; one set for each `process`, since their
    threads do not survive a fork."""
    make = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in interfaces.split(",")]


# (attribute of Megatron's parsed arguments, value on a CPU, reason). Upstream's defaults are for a GPU.
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
    ("cuda_graph_impl", "none", "only a GPU replays its launches"),
)


def parse_with_cpu_defaults(parse_args, *args, **kwargs):
    """`parse_args` with kernels and backends in its result that exist on a CPU; in a rehearsal, `replaced_on_cpu` of
    the result keeps the replaced ones."""
    parsed = parse_args(*args, **kwargs)
    flags_given = {word.partition("=")[0] for word in sys.argv[1:]}
    # Megatron also parses for itself, without our flags.
    is_rehearsal = getattr(parsed, "dry_run", "--dry-run" in flags_given)
    if is_rehearsal:
        parsed.replaced_on_cpu = {name: getattr(parsed, name) for name, _, _ in FLAGS}
    elif parsed.profile and not parsed.use_pytorch_profiler:  # ends the program at --profile-step-start
        raise ValueError("--profile marks steps for Nsight, which needs a GPU; add --use-pytorch-profiler, or drop it")
    for name, value, reason in FLAGS:
        given = getattr(parsed, name)
        flag = flag_of(name)
        if given != value and flag in flags_given and not is_rehearsal:
            if name == "transformer_impl":
                raise ValueError(f"{flag} {given} needs a GPU: {reason}; use {flag} {value}")
            _tell_once(f"{flag} {given} becomes {value} on the CPU: {reason}")
        setattr(parsed, name, value)
    return parsed


def not_compiled(function=None, **options):
    return function if function is not None else not_compiled


def not_scripted(obj, *args, **options):
    return obj


def device_arch_version(*args, **kwargs):
    return 10


def device_capability(*args, **kwargs):
    return 10, 0


def on_cpu(tensor, as_numpy=False, *args, **kwargs):
    """`maybe_move_tensor_to_cpu`; upstream's ignores `as_numpy` if there is nothing to move."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def build_from_local_layers(build_model, self, *args, **kwargs):
    """`HybridModelBuilder.build_model` with local layers for Transformer Engine's, the default and the usual --spec."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    from .local_hybrid import local_hybrid_spec

    config = self._model_config
    if config.hybrid_stack_spec in (None, hybrid_stack_spec):
        config.hybrid_stack_spec = local_hybrid_spec(config.transformer)
    return build_model(self, *args, **kwargs)


def build_loader_with_own_generator(build_data_loader, *args, **kwargs):
    """A data loader that draws the seed of its workers, when it starts, from a generator of its own, not from that of
    dropout, which a checkpoint may have set."""
    loader = build_data_loader(*args, **kwargs)
    if isinstance(loader, torch.utils.data.DataLoader):
        loader.generator = torch.Generator()
    return loader
