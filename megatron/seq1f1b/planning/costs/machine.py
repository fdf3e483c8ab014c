"""A machine as a file of cited constants: devices, their host, nodes, and the network between nodes.

The machines of this package lie in `machines/`, one TOML file each; a user passes the path of a file of the same form.
"""

import tomllib
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are peaks of the data sheet; efficiencies are what large kernels reach of them."""

    name: str
    memory_gib: float  # what a process can allocate, GiB
    peak_flops: float  # dense, 16 bit, FLOP/s
    memory_bandwidth: float  # bytes/s
    multiprocessors: int  # that work on the tiles of a matrix product
    matmul_efficiency: float  # of a matrix product of full waves
    memory_efficiency: float  # of kernels that only move data
    flash_forward: float  # FlashAttention, heads of 128, long sequences
    flash_backward: float
    kernel_latency: float  # seconds from the start of one kernel to the start of the next, on an empty device
    full_speed_rows: int = 128  # queries from which on attention is at full speed: a block of FlashAttention
    # Numbers of queries, ascending, each with the factor by which attention of fewer queries is slower.
    slow_attention: tuple[tuple[int, float], ...] = ()
    # Bytes/s to the memory of its host and at once back, while all devices of the node copy; 0: not known.
    host_bandwidth: float = 0.0
    host_memory_gib: float = 0.0  # what activations of one device may take of the memory of its host, GiB


@dataclass(frozen=True)
class Host:
    """The least seconds that the processor takes to launch kernels, whatever their size."""

    layer_forward: float
    layer_backward: float
    action: float  # per forward or backward of a model chunk: data, loss, bookkeeping of the schedule
    step: float  # per iteration, outside the pipeline


@dataclass(frozen=True)
class Link:
    """Inside a node, or between nodes. Bytes/s in each direction, seconds."""

    bandwidth: float  # bus bandwidth of collectives, as in nccl-tests: of a device in its node, of a node to others
    message_bandwidth: float  # the most that one device reaches with one peer
    latency: float  # of one hop


@dataclass(frozen=True)
class Machine:
    name: str
    device: Device
    host: Host
    devices_per_node: int
    node: Link
    network: Link
    error: float = 0.1  # mean relative error of its predictions of published times that it is not fitted to


def machine_names() -> list[str]:
    """The names of the machines in this package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def read_machine(machine: str | Path) -> Machine:
    """A machine of this package by its name, or any other by the path of its file.

    Raises ValueError if there is none, or if a constant is missing, unknown or no positive number.
    """
    path = _FOLDER / f"{machine}.toml"
    if not path.is_file():
        path = Path(machine)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        error, node = _positive("error", data.get("error", Machine.error), or_0=True), dict(data["node"])
        devices = _positive("devices", node.pop("devices"))
        if type(devices) is not int:
            raise TypeError(f"devices = {devices!r} is no whole number")
        device, host = _part(Device, data["device"]), _part(Host, data["host"])
        return Machine(path.stem, device, host, devices, _part(Link, node), _part(Link, data["network"]), error)
    except OSError as error:
        names = ", ".join(machine_names())
        raise ValueError(f"--machine {machine}: there is no such file, and this package has {names}") from error
    except (KeyError, TypeError, ValueError) as error:  # also what is not UTF-8, or not TOML
        raise ValueError(
            f"--machine {machine}: {path} is not TOML, lacks a constant or has a wrong one: {error}"
        ) from error


def _part[Part: (Device, Host, Link)](kind: type[Part], values: dict[str, Any]) -> Part:
    """Raises TypeError for a constant that is missing or unknown, ValueError for one that is no positive number."""
    values = {name: tuple(map(tuple, value)) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in values.items():
        for number in chain(*value) if isinstance(value, tuple) else [value]:
            if name != "name":
                _positive(name, number, or_0=kind is Host)
    return kind(**values)


def _positive(name: str, value: Any, or_0: bool = False) -> Any:
    if not isinstance(value, int | float) or not 0 <= value < inf or (value == 0 and not or_0):
        raise ValueError(f"{name} = {value!r} is no number above 0")
    return value


MIB, GIB = 2**20, 2**30


def in_words(size: float) -> str:
    """Bytes in the unit that makes them easiest to read."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# The CUDA context with PyTorch's kernels, by nvidia-smi 0.4 to 0.6 GiB on A100 and H100; the workspace of cuBLAS
# (CUBLAS_WORKSPACE_CONFIG, 8 MiB before Hopper); a buffer of NCCL (NCCL_BUFFSIZE) for each direction of each channel of
# a communicator; 16 channels are usual in a node (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
_CONTEXT, _CUBLAS_WORKSPACE, _NCCL_BUFFER, _NCCL_CHANNELS = 512 * MIB, 32 * MIB, 4 * MIB, 16


def bytes_outside(num_communicators: int) -> int:
    """Bytes on a GPU outside PyTorch's allocator, with `num_communicators` of NCCL."""
    return _CONTEXT + _CUBLAS_WORKSPACE + num_communicators * 2 * _NCCL_CHANNELS * _NCCL_BUFFER


# A process in half a dozen groups: tensor, context, pipeline, data and expert parallelism, and all ranks.
OUTSIDE_GIB = bytes_outside(num_communicators=6) / GIB
