"""Runs of mixtures of experts by NVIDIA on B200 and GB200, in 16 bit. Machine files of these devices are made of data
sheets and of what H100 reaches; nothing is fitted or measured on them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.machine import read_machine

from .hopper import RecipeSetup, of_recipe, predicted
from .row import REFERENCE, Row, known, measured, read, scaled

TABLE = "Blackwell, mixtures of experts"
_MODELS = {
    "gpt-oss-120b": preset("gpt-oss-120b"),
    "deepseek-v3": replace(preset("deepseek-v3"), prediction_depth=0),  # "w/o MTP"
}


def summary(folder: Path = REFERENCE) -> Iterator[Row]:
    """The sizes are those of the recipes of the same release."""
    for row in read("blackwell_megatron_bridge", folder):
        devices = int(row["gpus"])
        setup = of_recipe(known(_MODELS, row["model"]), row, program=RecipeSetup)
        published = scaled(measured(row["tokens_per_second_per_gpu"]), devices)
        release = row["source"].split()[-1]
        dispatcher = f"{row['dispatcher']} hidden" if setup.hides_experts else row["dispatcher"]
        label = f"{row['model']}, {devices} GPUs, {row['machine']}, EP {row['ep']}, {dispatcher}, {release}"
        yield predicted(TABLE, label, published, setup, read_machine(row["machine"]))
