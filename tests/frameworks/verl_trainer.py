"""verl's trainer for fine-tuning, as its user starts it: the words of its command line, its data, and what it leaves.

Its optimizer is Megatron's distributed one, without which verl saves no checkpoint. Conversations are of numbers.
"""

import json
import random
from pathlib import Path

import torch

from frameworks.models import save_qwen

VOCABULARY = 64
STEPS, CONVERSATIONS = 5, 8  # in each step
# Words of a conversation: a few long ones among short ones.
LENGTHS = (80, 12, 25, 61, 7, 33, 90, 18, 44, 9)


def words(folder: Path, name: str) -> list[str]:
    """For a pipeline of two stages, with checkpoints in a folder of this name."""
    return f"""
        model.path={folder}/model +model.override_config.attn_implementation=eager
        engine=megatron engine.pipeline_model_parallel_size=2 engine.vanilla_mbridge=True
        +engine.override_transformer_config.masked_softmax_fusion=False
        +engine.override_transformer_config.gradient_accumulation_fusion=False
        optim=megatron optim.lr=0.1 +optim.override_optimizer_config.adam_eps=1.0
        data.train_files={folder}/training.parquet data.val_files={folder}/validation.parquet data.num_workers=0
        data.train_batch_size={CONVERSATIONS} data.max_token_len_per_gpu=256 data.max_length=256
        trainer.device=cpu trainer.total_epochs=1 trainer.logger=[console,file]
        trainer.default_local_dir={folder}/{name} hydra.run.dir={folder}/hydra
    """.split()


def save_model_and_conversations(folder: Path) -> None:
    """A Qwen3 in `model`, whose tokenizer has a template, and conversations of a question and an answer."""
    import pandas

    save_qwen(folder / "model", VOCABULARY)
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    draw = random.Random(0)
    for name, number in (("training", STEPS * CONVERSATIONS), ("validation", CONVERSATIONS)):
        conversations = []
        for index in range(number):
            length = LENGTHS[index % len(LENGTHS)]
            numbers = [str(draw.randrange(4, VOCABULARY)) for _ in range(length)]
            question = " ".join(numbers[: length // 3])
            answer = " ".join(numbers[length // 3 :])
            conversations.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
        pandas.DataFrame({"messages": conversations}).to_parquet(folder / f"{name}.parquet")


def steps_of(metrics: Path) -> list[dict[str, float]]:
    """The losses and norms in a file of verl's logger, of each step and then of the validation."""
    names = ("train/loss", "train/grad_norm", "val/loss")
    lines = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return [{name: line[name] for name in names if name in line} for line in lines]


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint in a folder, in Hugging Face's format."""
    from safetensors.torch import load_file

    step = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    return load_file(folder / f"global_step_{step}" / "model" / "huggingface" / "model.safetensors")
