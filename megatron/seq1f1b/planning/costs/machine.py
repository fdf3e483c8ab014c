"""A machine as a file of cited constants: devices, the host that drives them, nodes, and the network between nodes.

The machines of this package lie in `machines/`, one TOML file each; a user passes the path of a file of the same form.
Every constant of such a file has its source beside it.
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
    # Queries, and how many times longer attention of fewer takes than the same work in long segments; ascending.
    slow_attention: tuple[tuple[int, float], ...] = ()
    # Bytes/s to the memory of its host, and at once as many back, while all devices of the node copy; 0: not known.
    host_bandwidth: float = 0.0
    host_memory_gib: float = 0.0  # of the memory of its host, what activations of one device may take, GiB


@dataclass(frozen=True)
class Host:
    """What the processor that launches kernels needs at least, whatever their size. Seconds."""

    layer_forward: float
    layer_backward: float
    action: float  # per forward or backward of a model chunk: data, loss, bookkeeping of the schedule
    step: float  # per iteration, outside the pipeline


@dataclass(frozen=True)
class Link:
    """Inside a node, or between nodes. Bytes/s in each direction, seconds.

    `bandwidth` is the bus bandwidth of collectives, as nccl-tests defines it: of one device inside a node, of a whole
    node to others. `message_bandwidth` is the most that one device reaches with one peer, `latency` that of one hop.
    """

    bandwidth: float
    message_bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """`error` is the mean relative error of its predictions of published times, on rows that it is not fitted to where
    there are such."""

    name: str
    device: Device
    host: Host
    devices_per_node: int
    node: Link
    network: Link
    error: float = 0.1


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
        node, error = dict(data["node"]), data.get("error", Machine.error)
        devices = node.pop("devices")
        if type(devices) is not int:
            raise TypeError(f"devices = {devices!r} is no whole number")
        _check("devices", devices)
        _check("error", error, may_be_0=True)
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
    tables = {name: tuple(map(tuple, value)) for name, value in values.items() if isinstance(value, list)}
    for name, value in values.items():
        for number in chain(*tables[name]) if name in tables else [value]:
            if name != "name":
                _check(name, number, may_be_0=kind is Host)
    return kind(**values | tables)


def _check(name: str, value: object, may_be_0: bool = False) -> None:
    """Raises ValueError for what is no positive number."""
    if not isinstance(value, int | float) or not 0 <= value < inf or (value == 0 and not may_be_0):
        raise ValueError(f"{name} = {value!r} is no number above 0")


MIB, GIB = 2**20, 2**30


def in_words(size: float) -> str:
    """Bytes in the unit in which they are easiest to read."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# The CUDA context with PyTorch's kernels loaded: what nvidia-smi shows after `torch.zeros(1, device="cuda")`, 0.4 to
# 0.6 GiB on A100 and H100 by driver and version; what cuBLAS allocates from PyTorch once for each handle and stream
# (CUBLAS_WORKSPACE_CONFIG, 8 MiB before Hopper); and a buffer of NCCL (NCCL_BUFFSIZE), for each direction of each
# channel of a communicator. There are up to 32 channels; 16 are usual between the GPUs of a node, fewer between nodes
# (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
_CONTEXT, _CUBLAS_WORKSPACE, _NCCL_BUFFER, _NCCL_CHANNELS = 512 * MIB, 32 * MIB, 4 * MIB, 16


def bytes_outside(num_communicators: int) -> int:
    """Bytes on a GPU outside of what is counted, with `num_communicators` of NCCL."""
    return _CONTEXT + _CUBLAS_WORKSPACE + num_communicators * 2 * _NCCL_CHANNELS * _NCCL_BUFFER


# A process in half a dozen groups: tensor, context, pipeline, data and expert parallelism, and all ranks.
OUTSIDE_GIB = bytes_outside(num_communicators=6) / GIB
