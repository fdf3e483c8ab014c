"""A machine as a file of cited constants (devices, their host, nodes, the network between nodes), and the time that one
operation takes on it, in seconds.

A multiprocessor computes one tile of a matrix product at a time. The last wave of tiles may leave some idle, and every
tile takes time to fill and drain, so small matrices are slower for each FLOP (NVIDIA, "Matrix Multiplication Background
User's Guide"). A ring moves the bytes of a collective over its slowest link; the ranks of a node share its links to
other nodes. The machines of this package lie in `machines/`, one TOML file each; a user passes the path of another.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs

from ..files.typed import Count, NonNegative, Share, read_toml, with_way_out
from ..process.near_names import did_you_mean
from .blocks import BYTES
from .cache_keys import hash_once
from .model_shape import ModelShape

_FOLDER = Path(__file__).parent / "machines"
# Rows, columns, and speed relative to the largest tile. Its efficiency is fitted; the other speeds are guesses.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))
# Steps along the dimension that is summed over, which take as long as to fill and drain a tile: a guess.
_TILE_OVERHEAD = 128
# Queries of a head, in the backward keys, on a multiprocessor at a time (arXiv 2307.08691, section 3.2).
ATTENTION_BLOCK = 128


# Wide limits, which numbers in other units exceed: TFLOP/s, GB/s, milliseconds and microseconds, bytes.
_Rate = Annotated[float, Meta(ge=1e6, lt=1e30)]
_KernelLatency = Annotated[float, Meta(ge=0, le=0.01)]
_HopLatency = Annotated[float, Meta(ge=0, le=0.05)]  # between distant data centres, too
_HostSeconds = Annotated[float, Meta(ge=0, le=0.1)]
_Gib = Annotated[float, Meta(gt=0, lt=2**15)]


class Device(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """One accelerator. Rates are peaks of the data sheet; efficiencies are what large kernels reach of them."""

    name: str
    memory_gib: _Gib  # what a process can allocate, GiB
    peak_flops: _Rate  # dense, 16 bit, FLOP/s
    memory_bandwidth: _Rate  # bytes/s
    multiprocessors: Count  # that work on the tiles of a matrix product
    matmul_efficiency: Share  # of a matrix product of full waves
    memory_efficiency: Share  # of kernels that only move data
    flash_forward: Share  # FlashAttention, heads of 128, long sequences
    flash_backward: Share
    kernel_latency: _KernelLatency  # from the start of one kernel to the start of the next, on an empty device
    # What attention with heads of 64, which wait for their exponentials, reaches of the rates of heads of 128: with
    # FlashAttention 2 on A100 0.85 (arXiv 2307.08691, section 4.1).
    flash_small_heads: Annotated[float, Meta(ge=0.5, le=1)] = 0.85
    full_speed_rows: Count = 128  # queries from which on attention is at full speed: a block of FlashAttention
    # Numbers of queries, ascending, each with the factor by which attention of fewer queries is slower.
    slow_attention: tuple[tuple[Count, Annotated[float, Meta(ge=1, le=1000)]], ...] = ()
    # Results/s of PyTorch's kernels on operands that repeat or are parts of rows, which they read number by number; 0:
    # not known, these kernels count as others.
    single_numbers: NonNegative = 0.0
    # Bytes/s to the memory of its host and at once back, while all devices of the node copy; 0: not known.
    host_bandwidth: NonNegative = 0.0
    host_memory_gib: NonNegative = 0.0  # what activations of one device may take of the memory of its host, GiB
    # The share of an exchange of experts that passes while products and attention of another micro-batch run, where
    # these take long enough (--overlap-moe-expert-parallel-comm).
    hidden_exchange: Share = 1.0
    # With products in 8 bits, the bytes moved to cast each number that enters a product, and to pad each number that
    # experts receive and return, in each direction.
    cast_bytes: NonNegative = 0.0
    padding_bytes: NonNegative = 0.0

    def __post_init__(self) -> None:
        queries = [number for number, _ in self.slow_attention]
        if queries != sorted({*queries}):
            raise ValueError("the numbers of queries in slow_attention must ascend")

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - devices are few
    def matmul_time(self, rows: float, columns: float, inner: float, batch: float = 1) -> float:
        """`batch` products of [rows, inner] and [inner, columns] in 16 bit."""
        if min(rows, columns, inner, batch) <= 0:
            return 0.0
        per_unit = self.peak_flops * self.matmul_efficiency / self.multiprocessors
        best = float("inf")
        for tile_rows, tile_columns, speed in _TILES:
            tiles = ceil(rows / tile_rows) * ceil(columns / tile_columns) * batch
            waves = ceil(tiles / self.multiprocessors)
            best = min(best, waves * 2 * tile_rows * tile_columns * (inner + _TILE_OVERHEAD) / (per_unit * speed))
        moved = BYTES * batch * (rows * inner + inner * columns + rows * columns)
        return max(best, self.moving_time(moved)) + self.kernel_latency

    def moving_time(self, num_bytes: float, num_kernels: int = 0) -> float:
        """`num_kernels` kernels that read and write `num_bytes` in all."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency) + num_kernels * self.kernel_latency

    def single_time(self, numbers: float, num_bytes: float) -> float:
        """Kernels of `numbers` results, some of whose operands repeat or are parts of rows; they read and write
        `num_bytes` in all."""
        moving = self.moving_time(num_bytes)
        return max(moving, numbers / self.single_numbers) if self.single_numbers else moving

    def flash_time(
        self, queries: int, keys: int, pairs: float, heads: float, head_dim: float, backward: bool = False
    ) -> float:
        """FlashAttention of `queries` on `keys`, with `pairs` of both in each head; `heads` are those of all sequences,
        `head_dim` is the mean size of a key and a value."""
        flops = (10 if backward else 4) * heads * head_dim * pairs  # the backward computes the scores again
        rate = self.peak_flops * (self.flash_backward if backward else self.flash_forward)
        rate *= min(1.0, 1 - (1 - self.flash_small_heads) * (128 - head_dim) / 64)
        # Few blocks leave multiprocessors without work, and the last wave is full by half on average.
        blocks = ceil((keys if backward else queries) / ATTENTION_BLOCK) * heads
        idle = self.multiprocessors / (2 * blocks) if blocks else 0.0
        return flops / rate * (1 + min(idle, self.multiprocessors)) + self.kernel_latency


class DeviceWithoutTiles(Device, frozen=True):
    """A device that divides a matrix product into any parts: no product takes it longer, and it never takes longer for
    a whole than for parts."""

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - devices are few
    def matmul_time(self, rows: float, columns: float, inner: float, batch: float = 1) -> float:
        if min(rows, columns, inner, batch) <= 0:
            return 0.0
        flops = 2 * batch * rows * columns * (inner + _TILE_OVERHEAD)
        moved = BYTES * batch * (rows * inner + inner * columns + rows * columns)
        return max(flops / (self.peak_flops * self.matmul_efficiency), self.moving_time(moved)) + self.kernel_latency


class Host(Struct, frozen=True, forbid_unknown_fields=True):
    """The least seconds that the processor takes to launch kernels, whatever their size."""

    layer_forward: _HostSeconds
    layer_backward: _HostSeconds
    action: _HostSeconds  # per forward or backward of a model chunk: data, loss, bookkeeping of the schedule
    step: Annotated[float, Meta(ge=0, le=60)]  # per iteration, outside the pipeline
    # Per expert of a rank in the forward of a layer, twice that in the backward.
    expert: _HostSeconds = 0.0
    # In the forward of a layer with experts, from the end of the router until the device computes again. Every
    # dispatcher of Megatron brings the counts of tokens to the host, which waits for them and launches what follows.
    counts: _HostSeconds = 0.0


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """Inside a node, or between nodes. Bytes/s in each direction, seconds."""

    bandwidth: _Rate  # bus bandwidth of collectives, as in nccl-tests: of a device in its node, of a node to others
    message_bandwidth: _Rate  # the most that one device reaches with one peer
    latency: _HopLatency  # of one hop


@dataclass(frozen=True)
class Group:
    """`size` ranks at a distance of `stride` ranks."""

    size: int
    stride: int

    def in_node(self, machine: "Machine") -> int:
        """The number of its ranks in a node."""
        return min(self.size, max(1, machine.devices_per_node // self.stride))


@dataclass(frozen=True)
class Machine:
    name: str
    device: Device
    host: Host
    devices_per_node: int
    node: Link
    network: Link
    error: float = 0.1  # mean relative error of its predictions of published times that it is not fitted to
    error_of_mixtures: float = 0.15  # the same of mixtures of experts

    __hash__ = hash_once

    def error_of(self, model: ModelShape) -> float:
        """The mean relative error of predictions for a model of this kind."""
        return self.error if model.experts is None else self.error_of_mixtures

    def all_gather_time(self, group: Group, num_bytes: float) -> float:
        """All-gather or reduce-scatter over a ring; `num_bytes` is the size of the whole, on every rank."""
        if group.size == 1:
            return 0.0
        here = group.in_node(self)
        node = self.node
        network = self.network
        bandwidth = node.bandwidth
        if here < group.size:  # as many groups as `devices / here` leave a node side by side
            way_out = min(network.bandwidth * here / self.devices_per_node, network.message_bandwidth * here)
            bandwidth = min(bandwidth, way_out) if here > 1 else way_out
        hops = ceil(log2(here)) * node.latency
        hops += ceil(log2(ceil(group.size / here))) * network.latency
        return num_bytes * (group.size - 1) / group.size / bandwidth + hops

    def all_reduce_time(self, group: Group, num_bytes: float) -> float:
        """A reduce-scatter and an all-gather in one."""
        return 2 * self.all_gather_time(group, num_bytes)

    def all_to_all_time(self, group: Group, num_bytes: float) -> float:
        """Every rank holds `num_bytes` and keeps one of `size` parts; ranks of a node send to others all at once."""
        if group.size == 1:
            return 0.0
        here = group.in_node(self)
        inside = num_bytes * (here - 1) / group.size / self.node.bandwidth
        if here == group.size:
            return inside + self.node.latency * ceil(log2(here))
        share = min(self.network.bandwidth / self.devices_per_node, self.network.message_bandwidth)
        outside = num_bytes * (group.size - here) / group.size / share
        return max(inside, outside) + self.network.latency * ceil(log2(group.size / here))

    def multicast_time(self, group: Group, num_bytes: float, nodes: float, ranks: float) -> float:
        """Every rank holds tokens of `num_bytes`, and sends each to `ranks` ranks of the group in `nodes` nodes, itself
        and its own among them, in the mean: once to a node, and there to the ranks. One after the other, both take 1 to
        8 % longer than a dispatch and a combine of HybridEP in the mean, on 16, 32 and 64 H100 (DeepEP, branch
        hybrid-ep, docs/README_Hybrid-EP.md, with 16 multiprocessors)."""
        here = group.in_node(self)
        inside = num_bytes * ranks * (here - 1) / here / self.node.bandwidth
        if here == group.size:
            return inside + self.node.latency * ceil(log2(here))
        others = 1 - here / group.size
        share = min(self.network.bandwidth / self.devices_per_node, self.network.message_bandwidth)
        outside = num_bytes * nodes * others / share
        return inside + outside + self.network.latency * ceil(log2(group.size / here))

    def message_time(self, source: int, destination: int, num_bytes: float, senders: int) -> float:
        """A message from rank to rank, while `senders` ranks of a node send to other nodes at once."""
        devices = self.devices_per_node
        network = self.network
        if source // devices == destination // devices:
            return self.node.latency + num_bytes / self.node.message_bandwidth
        bandwidth = network.message_bandwidth
        if senders > 1:  # over TCP, collectives reach less than one message alone
            bandwidth = min(bandwidth, network.bandwidth / senders)
        return network.latency + num_bytes / bandwidth


@lru_cache
def without_tiles(machine: Machine) -> Machine:
    """The machine with devices whose times are a lower bound for every cut of a sequence."""
    return replace(machine, device=DeviceWithoutTiles(**structs.asdict(machine.device)))


def machine_names() -> list[str]:
    """The names of the machines in this package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


class _Node(Link, frozen=True, forbid_unknown_fields=True, kw_only=True):
    devices: Annotated[int, Meta(ge=1, le=10_000)]


class _File(Struct, forbid_unknown_fields=True):
    device: Device
    host: Host
    node: _Node
    network: Link
    error: Annotated[float, Meta(ge=0, lt=1)] = Machine.error
    error_of_mixtures: Annotated[float, Meta(ge=0, lt=1)] = Machine.error_of_mixtures


def read_machine(machine: str | Path) -> Machine:
    """A machine of this package by its name, or any other by the path of its file. Raises ValueError if there is none,
    or if something in it is missing, unknown or out of range."""
    path = _FOLDER / f"{machine}.toml"
    if not path.is_file():
        path = Path(machine)
    if not path.exists():
        names = machine_names()
        way_out = did_you_mean(str(machine), names) or f"this package has {', '.join(names)}"
        raise ValueError(f"--machine {machine}: there is no such machine, and no such file; {way_out}")
    try:
        file = read_toml(path, _File)
    except ValueError as error:
        if "expected a number" not in str(error):
            raise
        raise with_way_out(error, "rates are in FLOP/s and bytes/s, times in seconds, memory in GiB") from None
    node = Link(file.node.bandwidth, file.node.message_bandwidth, file.node.latency)
    return Machine(
        path.stem,
        file.device,
        file.host,
        file.node.devices,
        node,
        file.network,
        file.error,
        file.error_of_mixtures,
    )


MIB = 2**20
GIB = 2**30

# The CUDA context with PyTorch's kernels, by nvidia-smi 0.4 to 0.6 GiB on A100 and H100; the workspace of cuBLAS
# (CUBLAS_WORKSPACE_CONFIG, 8 MiB before Hopper); a buffer of NCCL (NCCL_BUFFSIZE) for each direction of each channel of
# a communicator; 16 channels are usual in a node (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
_CONTEXT = 512 * MIB
_CUBLAS_WORKSPACE = 32 * MIB
_NCCL_BUFFER = 4 * MIB
_NCCL_CHANNELS = 16


def bytes_outside(num_communicators: int) -> int:
    """Bytes on a GPU outside PyTorch's allocator, with `num_communicators` of NCCL."""
    return _CONTEXT + _CUBLAS_WORKSPACE + num_communicators * 2 * _NCCL_CHANNELS * _NCCL_BUFFER


# A process in half a dozen groups: tensor, context, pipeline, data and expert parallelism, and all ranks.
OUTSIDE_GIB = bytes_outside(num_communicators=6) / GIB
