"""The page of what Megatron is credited with names every flag that could make it a stronger opponent."""

import argparse
import re
from pathlib import Path

from megatron.training.arguments import add_megatron_arguments

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"
# Words of flags that save memory of training, or hide messages or launches of it.
SAVES = re.compile(
    r"offload|overlap|recompute|fsdp|shard|stash|(delay|embedding|experts)-wgrad|checkpoint-act|precision-aware"
    r"|param-gather|param-ag|hierarchical|hybrid-context|grad-reduce|grads-in|-dtype|reduce-scatter|nccl-ub|sharp|all-gather"
    r"|optimizer-instances|loss-fusion|empty-unused|high-priority|deepep|hybridep|dispatcher|cp-comm-type|capacity"
    r"|saved-act|chunks-for-training|lm-cross-entropy|tp-comm-(bulk|split)|ddp-bucket|ddp-num|ddp-pad|dp-mapping|microbatch-group"
    r"|cuda-graph"
)
# What has these words and is of inference, checkpoints, data or orders of launches.
OTHERS = re.compile(
    r"^--(no-)?rl-|inference|ckpt|dist-|distrib-|load|data-sharding|align-param-gather|save-|ssm-states|router-dtype|decode-only"
)


def named_by_megatron() -> set[str]:
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = [flag for flag in parser._option_string_actions if SAVES.search(flag)]
    return {flag for flag in flags if not OTHERS.search(flag.replace("offload", ""))}


def named_by_the_page() -> set[str]:
    page = PAGE.read_text(encoding="utf-8")
    _, part = page.split("\n## What Megatron alone is credited with\n")
    return set(re.findall(r"--[a-z][a-z0-9-]+", part.split("\n## ")[0]))


def test_every_flag_that_saves_or_hides_is_on_the_page():
    flags = named_by_megatron()
    assert {"--cpu-offloading-num-layers", "--use-megatron-fsdp", "--optimizer-cpu-offload"} < flags
    assert flags - named_by_the_page() == set()


def test_the_page_names_no_flag_that_megatron_lacks():
    known = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions
    ours = {"--output", "--offload-activations", "--model", "--seq-length", "--machine", "--gpus", "--tokens"}
    ours |= {"--bandwidths", "--host-bandwidths", "--picture", "--offload-modules", "--offload-layers-leaving"}
    assert named_by_the_page() - ours - set(known) == set()
