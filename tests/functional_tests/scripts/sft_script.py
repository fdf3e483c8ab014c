"""pretrain_gpt.py where the package `datasets`, with which Megatron's SFTDataset reads files, need not be installed."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace


def load_dataset(_: str, data_files: str, split: str) -> list[dict]:
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


if __name__ == "__main__":
    sys.modules["datasets"] = SimpleNamespace(load_dataset=load_dataset)
    import pretrain_gpt

    pretrain_gpt.main(pretrain_gpt.gpt_config_from_args, {})
