"""Megatron's run, from the arguments that Megatron parsed."""

from argparse import Namespace
from types import MappingProxyType

from .megatron_run import MegatronRun, megatron_run


def run_of_arguments(args: Namespace) -> MegatronRun:
    """The run of Megatron's parsed and validated arguments; in a rehearsal, that of the real launch."""
    features = dict(vars(args))
    if features.get("dry_run") and args.device != "cpu":
        features |= args.replaced_on_cpu
    return megatron_run(MappingProxyType(features), _num_microbatches(args))


def _num_microbatches(args: Namespace) -> int:
    sizes = [getattr(args, name, None) for name in ("global_batch_size", "micro_batch_size", "data_parallel_size")]
    return max(1, sizes[0] // (sizes[1] * sizes[2])) if all(sizes) else 1
