"""Measure what segments of a sequence cost on this machine, for --sequence-split-strategy profile.

    seq1f1b profile --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
        --seq-length 32768 --bf16 --output profile.json

Forward and backward of one transformer layer are timed over a grid of segment lengths and prefixes, those of the
embedding and of the head (final norm, vocabulary, loss) over the lengths: on the GPU if there is one, else on the CPU
with OMP_NUM_THREADS threads (1 by default, as in training). The number of layers does not matter.
Tensor parallelism, experts and latent attention are measured in a run instead: train a few iterations with
--sequence-splits 4 --pipeline-trace DIR, and give the trace in DIR to --sequence-split-profile.
"""

import argparse
import os
from pathlib import Path

from ..planning.costs import Profile, write_profile
from .model_flags import add_model_flags, model_of
from .parsing import Parser, check_output, count


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_model_flags(parser, num_layers=4, hidden_size=256, num_attention_heads=4, vocab_size=512)
    parser.add_argument("--seq-length", type=count, default=8192, help="of the sequences to be cut; default: 8192")
    parser.add_argument("--micro-batch-size", type=count, default=1, help="default: 1")
    parser.add_argument("--bf16", action="store_true", help="default: fp32, or bf16 on a GPU")
    parser.add_argument("--repeats", type=count, default=3, help="the median counts; default: 3")
    parser.add_argument("--output", type=Path, default=Path("profile.json"), help="a .json; default: profile.json")
    return parser.parse_args(argv)


def grid(sequence_length: int) -> tuple[list[int], list[int]]:
    """Lengths and prefixes: down from the half of the sequence by factors of two, and of three halves of those."""
    shortest = max(1, min(256, sequence_length // 8))
    lengths = {sequence_length // 2 ** (i // 2) * (4 - i % 2) // 4 for i in range(1, 40)}
    lengths = sorted(length for length in lengths if length >= shortest)
    return lengths, [0, sequence_length // 8, sequence_length // 2, sequence_length * 7 // 8]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    shape = model_of(args)
    check_output(args.output, ".json")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .profile_bench import Bench  # imports Megatron, which takes seconds and warns

    bench = Bench(args, shape)
    lengths, prefixes = grid(args.seq_length)
    parts = {"layer": [], "embedding": [], "head": []}
    print(f"{'part':10}{'tokens':>8}{'prefix':>8}{'forward ms':>12}{'backward ms':>13}{'of it W':>10}")
    for length in lengths:
        measurements = [
            ("layer", bench.layer(length, prefix)) for prefix in prefixes if prefix + length <= args.seq_length
        ]
        measurements += [("embedding", bench.embedding(length)), ("head", bench.head(length))]
        for part, row in measurements:
            parts[part].append(row)
            print(
                f"{part:10}{length:8}{row.prefix:8}{1e3 * row.forward:12.3f}{1e3 * row.backward:13.3f}"
                f"{1e3 * row.weight:10.3f}",
                flush=True,
            )
    profile = Profile(bench.name, shape, args.micro_batch_size, 1, parts)
    error = profile.fit_error()
    write_profile(profile, args.output)
    print(
        f"\n{args.output} written. The fit is off by {100 * error.mean:.1f} % on average and by "
        f"{100 * error.highest:.1f} % at most (layers after a prefix; TeraPipe's equation 9)."
    )
    bench.close()
