#!/usr/bin/env python3
"""Hold the simulator against a slow network: two ranks in network namespaces of one machine, over a limited link.

    sudo python tools/benchmark_network.py --seq-length 4096 --hidden-size 256 --repeats 7

1F1B, its interleaved form, Seq1F1B and Seq1F1B-I run at rates of the link at which the output of a stage takes a
tenth, a half and all of the time of its forward. Times of actions come from other runs in one, four and eight segments,
those of messages from messages of the same sizes alone; steps are simulated by these. All runs at one rate
are timed in turn, and the faster half of the steps of each counts. Needs root, and `ip`, `tc` and `sysctl`. The
namespaces are gone at the end.
"""

from benchmarking.device import parser_of, start  # before Megatron

# isort: split
import argparse
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import ceil, hypot
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmark import run_step
from benchmarking.model import Batch, build_model, use_ranks
from benchmarking.prediction import predicted_seconds
from benchmarking.profile import Profile, profile_of
from benchmarking.variants import Variant, ours
from megatron.seq1f1b.partition import even, segment_times
from megatron.seq1f1b.schedule import Kind

_SPACES = ("seq1f1b-0", "seq1f1b-1")
_INTERFACES = ("seq1f1b-v0", "seq1f1b-v1")
_ADDRESSES = ("10.211.77.1", "10.211.77.2")
_PORT = "29511"
# Of the time of a forward, what its output takes on the link.
SHARES = (0.1, 0.5, 1.0)
_MICROBATCHES = 4
# By number of model chunks: the names of methods, each with its segments.
METHODS = {
    1: {"1F1B": 1, "Seq1F1B, k = 4": 4},
    2: {"interleaved 1F1B, C = 2": 1, "Seq1F1B-I, k = 4, C = 2": 4},
}
# Segments of the runs that are the profile. They have as many micro-batches as the methods: with fewer, both ranks
# would less often compute at once, and each would more often have the memory's bandwidth for itself.
_PROFILED = (1, 4, 8)
# A message in flight may wait in the queue of the interface.
_QUEUE_BYTES = 256 * 2**20
# The processor handles each packet, and has none to spare for many small ones.
_PACKET_BYTES = 16 * 2**10
# A link that was idle takes so much at once: as little as it can, a packet with its headers, since a small message
# would be that much faster than its share of a large one.
_BURST_BYTES = _PACKET_BYTES + 2**10
# A receive is announced to the sender; behind megabytes that wait in a socket, the announcement would come late.
_SOCKET_BYTES = 64 * 2**10
_FIXED = {
    "pipeline_schedule": ["1f1b"],
    "pipeline_placement": "looped",
    "context_parallel_size": 1,
    "sequence_split_profile": None,
}


class Result(NamedTuple):
    """A method at one rate of the link: seconds of each of its steps that count, and of a step as predicted."""

    share: float
    method: str
    measured: Sequence[float]
    predicted: float
    rate: float  # bytes/s


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, seq_length=4096)
    return argparse.Namespace(**_FIXED, **vars(parser.parse_args()))


def limit(interface: str, rate: float | None) -> None:
    """Let an interface of this namespace send so many bytes/s; None: any number."""
    subprocess.run(["tc", "qdisc", "del", "dev", interface, "root"], stderr=subprocess.DEVNULL, check=False)
    if rate is not None:
        bucket = f"tbf rate {8 * rate:.0f}bit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
        subprocess.run(["tc", "qdisc", "add", "dev", interface, "root", *bucket.split()], check=True)


def seconds_of_messages(sizes: Iterable[int], repeats: int = 25) -> dict[int, float]:
    """What messages of so many bytes take on the limited link: half of the median time there and back, as the first
    rank has it."""
    found = [{size: _message_seconds(size, repeats) for size in sizes}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _message_seconds(size: int, repeats: int) -> float:
    """The first two messages warm up."""
    tensor = torch.zeros(size // 4)
    rank = dist.get_rank()
    seconds = []
    for _ in range(2 + repeats):
        dist.barrier()
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(tensor, 1 - sender)
            else:
                dist.recv(tensor, sender)
        seconds.append((time.perf_counter() - began) / 2)
    return statistics.median(seconds[2:])


def timed(variants: list[Variant], repeats: int) -> None:
    """Time steps of each, in turn; the first round warms up. Keeps the faster half of the steps of each variant, the
    fastest first: whatever else a machine does only delays a step. So a round of a profile has the nth fastest step of
    each of its runs."""
    for variant in variants:
        for values in _measured(variant):
            values.clear()
    for _ in range(repeats + 1):
        for variant in variants:
            run_step(variant)
    for variant in variants:
        fastest = sorted(range(1, repeats + 1), key=variant.seconds.__getitem__)[: ceil(repeats / 2)]
        for values in _measured(variant):
            values[:] = [values[number] for number in fastest]


def _measured(variant: Variant) -> tuple[list, ...]:
    """What has a value for each step."""
    return variant.seconds, variant.cpu_seconds, variant.spans


class Ratio(NamedTuple):
    """A mean step as a part of another, with its standard error: None for single steps."""

    value: float
    uncertain: float | None


def ratio_of_means(steps: Sequence[float], others: Sequence[float]) -> Ratio:
    """Of as many steps as others."""
    value = statistics.mean(steps) / statistics.mean(others)
    if len(steps) == 1:
        return Ratio(value, None)
    spreads = (statistics.stdev(values) / statistics.mean(values) for values in (steps, others))
    return Ratio(value, value * hypot(*spreads) / len(steps) ** 0.5)


def rates_of_shares(size: int, forward: float) -> dict[float, float]:
    """Bytes/s at which `size` bytes take each of SHARES of the seconds of a forward on the first rank."""
    found = [{share: size / (share * forward) for share in SHARES}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def forward_seconds(profile: Profile, length: int) -> float:
    """The forward of a whole sequence on the slowest stage."""
    return max(segment_times((length,), stage)[0] for stage in profile.times[Kind.F])


def compare(args: argparse.Namespace, interface: str) -> Iterator[Result]:
    """All methods at each rate of the link, with the runs of their profiles. All of them are timed in turn, so that
    none has a slower machine than another."""
    use_ranks(1)
    batch = Batch(args)
    models = {num_chunks: build_model(args, num_chunks) for num_chunks in METHODS}

    def variants(num_chunks: int, segments: Iterable[int]) -> list[Variant]:
        model = models[num_chunks]
        cuts = (even(args.seq_length, number) for number in segments)
        return [ours(args, "1f1b", "even", cut, model, batch, _MICROBATCHES) for cut in cuts]

    profiled = {num_chunks: variants(num_chunks, _PROFILED) for num_chunks in METHODS}
    compared = {num_chunks: variants(num_chunks, methods.values()) for num_chunks, methods in METHODS.items()}
    in_turn = [*chain(*profiled.values()), *chain(*compared.values())]
    bytes_of_output = 4 * args.hidden_size * args.seq_length
    sizes = sorted({bytes_of_output // segments for methods in METHODS.values() for segments in methods.values()})
    limit(interface, None)
    timed(profiled[1], args.repeats)
    rates = rates_of_shares(bytes_of_output, forward_seconds(profile_of(profiled[1]), args.seq_length))
    for share, rate in rates.items():
        limit(interface, rate)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{rate / 1e6:.3g} MB/s ...", file=sys.stderr, flush=True)
        messages = seconds_of_messages(sizes)
        timed(in_turn, args.repeats)
        for num_chunks, methods in METHODS.items():
            profile = profile_of(profiled[num_chunks])
            for (name, segments), variant in zip(methods.items(), compared[num_chunks], strict=True):
                message = messages[bytes_of_output // segments]
                yield Result(share, name, tuple(variant.seconds), predicted_seconds(variant, profile, message), rate)
    limit(interface, None)


def table(results: list[Result]) -> str:
    """Each method at each rate, with its step, and as a part of that of 1F1B at the same rate."""
    head = ("message of a forward", "method", "step s", "predicted", "to 1F1B", "predicted", "error")
    lines = [f"| {' | '.join(head)} |", len(head) * "|---" + "|"]
    errors = []
    for share in SHARES:
        of_share = [result for result in results if result.share == share]
        first = of_share[0]
        for result in of_share:
            measured = ratio_of_means(result.measured, first.measured)
            predicted = result.predicted / first.predicted
            error = predicted / measured.value - 1
            uncertain = ""
            if result is not first:
                errors.append(abs(error))
                uncertain = "" if measured.uncertain is None else f" ± {measured.uncertain:.2f}"
            lines.append(
                f"| {share:g} | {result.method} | {statistics.mean(result.measured):.2f} | {result.predicted:.2f} | "
                f"{measured.value:.2f}{uncertain} | {predicted:.2f} | {100 * error:+.1f} % |"
            )
    off = f"{100 * statistics.mean(errors):.1f} % off in the mean, {100 * max(errors):.1f} % at worst"
    return "\n".join([*lines, "", f"The ratios are predicted {off}."])


def run_rank() -> None:
    args = parse()
    logging.disable(logging.INFO)
    start()
    interface = _INTERFACES[dist.get_rank()]
    results = [*compare(args, interface)]
    if dist.get_rank() == 0:
        rates = dict.fromkeys(result.rate for result in results)
        print(
            f"2 ranks, {_MICROBATCHES} micro-batches of one sequence of {args.seq_length} tokens, {args.num_layers} "
            f"layers, hidden {args.hidden_size}; means of the faster half of {args.repeats}; links of "
            f"{', '.join(f'{rate / 1e6:.3g}' for rate in rates)} MB/s\n\n{table(results)}"
        )
    dist.destroy_process_group()


@contextmanager
def linked_namespaces() -> Iterator[None]:
    """Two network namespaces with a link between them."""
    commands = [f"ip netns add {space}" for space in _SPACES]
    remove_namespaces()  # those of a run that was killed
    near, far = (f"{interface} netns {space}" for interface, space in zip(_INTERFACES, _SPACES, strict=True))
    commands.append(f"ip link add {near} type veth peer name {far}")
    for space, interface, address in zip(_SPACES, _INTERFACES, _ADDRESSES, strict=True):
        commands += [
            f"ip -n {space} address add {address}/24 dev {interface}",
            f"ip -n {space} link set {interface} mtu {_PACKET_BYTES} up",
            f"ip -n {space} link set lo up",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        for space in _SPACES:
            buffers = f"net.ipv4.tcp_wmem={_SOCKET_BYTES} {_SOCKET_BYTES} {_SOCKET_BYTES}"  # least, default, most
            subprocess.run(["ip", "netns", "exec", space, "sysctl", "-qw", buffers], check=True)
        yield
    finally:
        remove_namespaces()


def remove_namespaces() -> None:
    """Remove the namespaces that are there, with the link between them."""
    for space in _SPACES:
        subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)


def launch() -> int:
    """Run a rank in each namespace; returns an exit code."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "sysctl"))):
        print(
            "error: network namespaces and limits of links need root, ip and tc of iproute2, and sysctl of procps",
            file=sys.stderr,
        )
        return 1
    with linked_namespaces():
        ranks = []
        for rank, (space, interface) in enumerate(zip(_SPACES, _INTERFACES, strict=True)):
            names = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": _ADDRESSES[0],
                "MASTER_PORT": _PORT,
                "GLOO_SOCKET_IFNAME": interface,
            }
            command = ["ip", "netns", "exec", space, sys.executable, *sys.argv]
            ranks.append(subprocess.Popen(command, env=os.environ | names))
        try:
            return max(abs(rank.wait()) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    parse()
    if "RANK" in os.environ:
        run_rank()
    else:
        sys.exit(launch())
