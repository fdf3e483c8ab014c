"""Runs of mixtures of experts by NVIDIA on B200 and GB200, in 16 bit. Machine files of these devices are made of data
sheets and of what H100 reaches; nothing is fitted or measured on them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.machine import read_machine

from .hopper import RecipeSetup, of_recipe, of_tflops, predicted
from .row import REFERENCE, Row, known, measured, read, scaled

TABLE = "Blackwell, mixtures of experts"
_MODELS = {
    "gpt-oss-120b": preset("gpt-oss-120b"),
    "deepseek-v3": replace(preset("deepseek-v3"), prediction_depth=0),  # "w/o MTP"
    "qwen3-235b-a22b": preset("qwen3-235b-a22b"),
}


def summary(folder: Path = REFERENCE) -> Iterator[Row]:
    """The sizes are those of the recipes of the same release, but for qwen3-235b-a22b, where NVIDIA's page has others.
    Graphs of routers alone leave the host most of its launches, and do not count."""
    for row in read("blackwell_megatron_bridge", folder):
        devices = int(row["gpus"])
        model = known(_MODELS, row["model"])
        setup = of_recipe(model, row, program=RecipeSetup, replays_layers=row.is_set("graphs"))
        published = scaled(measured(row["tokens_per_second_per_gpu"]), devices)
        if published is None:
            published = of_tflops(setup, measured(row["model_tflops_per_gpu"]))
        *_, release = row["source"].partition(" release ")
        dispatcher = f"{row['dispatcher']} hidden" if setup.hides_experts else row["dispatcher"]
        words = [row["model"], f"{devices} GPUs", row["machine"], f"EP {row['ep']}", dispatcher, release]
        label = ", ".join(word for word in words if word)
        yield predicted(TABLE, label, published, setup, read_machine(row["machine"]))
