#!/usr/bin/env python3
"""Draw the pictures of schedules in docs/images: two simulated timelines each, one above the other.

python tools/pictures.py
"""

import tempfile
from pathlib import Path

from megatron.seq1f1b.commands import run

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FOUR_RANKS = "--pipeline-model-parallel-size 4 --num-microbatches 4"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
# The flags of `seq1f1b plot` for the upper and the lower panel.
PICTURES = {
    # Sequences that are not cut take four times as long as a quarter.
    "1f1b.png": ("--costs f=4,i=4,w=4", "--sequence-splits 4"),
    "chunks.svg": (
        f"--sequence-splits 2 {CHUNKS}",
        f"--sequence-splits 2 {CHUNKS} --pipeline-placement v",
    ),
    "zero_bubble.svg": (
        "--sequence-splits 2 --pipeline-schedule zb-h1",
        f"--sequence-splits 2 --pipeline-schedule auto {CHUNKS} --pipeline-placement v",
    ),
    "pairs.svg": (
        "--sequence-splits 4",
        "--sequence-splits 4 --overlap-moe-expert-parallel-comm",
    ),
    "breadth_first.svg": (
        "--sequence-splits 2 --pipeline-schedule gpipe",
        f"--sequence-splits 2 --pipeline-schedule breadth-first {CHUNKS}",
    ),
}


def draw(name: str, folder: Path) -> None:
    """Draw one of PICTURES into a folder."""
    with tempfile.TemporaryDirectory() as work:
        timelines = [f"{work}/upper.json", f"{work}/lower.json"]
        for timeline, flags in zip(timelines, PICTURES[name], strict=True):
            plot([*FOUR_RANKS.split(), *flags.split(), "--output", timeline])
        plot(["--timeline", *timelines, "--output", str(folder / name)])


def plot(words: list[str]) -> None:
    if run("plot", words):
        raise SystemExit(2)


if __name__ == "__main__":
    for name in PICTURES:
        draw(name, IMAGES)
