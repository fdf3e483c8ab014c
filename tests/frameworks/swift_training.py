"""`megatron sft` and `megatron rlhf` of ms-swift on two pipeline stages of a CPU.

Its entry points run unmodified, from the words of their command line to the checkpoint and on from it: templates,
packing, trainer, forward step, loss, LoRA, evaluation, and import of weights by mcore-bridge. What a CPU needs here:

- The double of Transformer Engine's kernels (support/te_double.py), since mcore-bridge builds its layers.
- Examples are packed in a fork, since a process started anew would find no double.
- gloo (`--ddp_backend`), fp32, and nothing that is fused on GPUs. No export of weights, which moves them to a GPU.
- The mean divergence of KTO stays on its one replica: gloo gathers no scalars.
- A callback that keeps what is logged. The process group outlives a training, for the next one.
- A stub in place of the server that answers the prompts of GRPO (swift_rollouts.py).
- Texts are numbers, and a Qwen3 of four layers is made on the spot.
"""

import json
import multiprocessing
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from frameworks.equal_steps import Training
from frameworks.installed import installed
from frameworks.live_bytes import LiveBytes
from frameworks.models import save_qwen
from frameworks.swift_rollouts import answered_by_a_stub
from megatron.seq1f1b.process.patches import Patch, patched

VOCABULARY, STEPS = 128, 5
STOPS_AFTER = 3
# Tokens of a pack; micro-batches of a step.
PACK, MICROBATCHES = 96, 4
# Tokens of an example: a few long ones among short ones.
LENGTHS = (80, 12, 25, 61, 7, 33, 90, 18, 44, 9)

# Name of a case -> further words of the command line.
LORA = "--tuner_type lora --target_modules all-linear --lora_rank 4"
GRPO = (
    "--rlhf_type grpo --vllm_mode server --vllm_server_host localhost --reward_funcs evenness --beta 0.04 "
    "--num_generations 4 --micro_batch_size 2 --global_batch_size 8 --max_completion_length 64"
)
CASES = {
    "packed": "--packing true",
    "packed-lora": f"--packing true {LORA}",
    "dpo": "--rlhf_type dpo --micro_batch_size 2",
    "dpo-lora": f"--rlhf_type dpo --micro_batch_size 2 {LORA}",
    "kto": "--rlhf_type kto --micro_batch_size 2 --lr 0.01",
    "reward": "--rlhf_type rm --micro_batch_size 2",
    # Chosen and rejected answers in one batch, as long as the longest, with a mask that hides later tokens and padding.
    "reward-padded": "--rlhf_type rm --micro_batch_size 2 --padding_free false",
    "grpo": GRPO,
    "grpo-padded": f"{GRPO} --padding_free false",
    "grpo-lora": f"{GRPO} {LORA}",
    "grpo-off-policy": f"{GRPO} --steps_per_generation 2",
}
# ms-swift generates anew where it goes on, also where a step was to use answers of an earlier one.
RESUMED = [name for name in CASES if name != "grpo-off-policy"]


def with_segments_and_without(folder: Path) -> dict[str, tuple[Training, Training]]:
    """The cases, by segments of 16 tokens, and without segments."""
    _prepare(folder)
    results = {}
    for name, words in CASES.items():
        with installed(segment_tokens=16):
            ours = fine_tune(folder, words, folder / f"{name}-ours")
        # Megatron knows packs on a CPU neither in its own attention nor in Transformer Engine's.
        with installed(segment_tokens=4096):
            own = fine_tune(folder, words, folder / f"{name}-own")
        results[name] = ours, own
        print(name, ours, own, flush=True)
    return results


@dataclass
class Resumed:
    """Of one rank, by segments: a whole training, one that stops, and one that goes on from its checkpoint."""

    whole: Training
    stopped: Training
    resumed: Training


def stopped_and_resumed(folder: Path) -> dict[str, Resumed]:
    """The cases by segments, as a whole, and stopped after three steps. The optimizer has state, and is Adam: Megatron
    cannot load that of SGD in fp32."""
    _prepare(folder)
    results = {}
    with installed(segment_tokens=16):
        for name in RESUMED:
            words = f"{CASES[name]} --optimizer adam --lr 0.01"
            whole = fine_tune(folder, words, folder / f"{name}-whole")
            stops = f"--train_iters {STOPS_AFTER} --eval_steps {STOPS_AFTER} --save_steps {STOPS_AFTER}"
            stopped = fine_tune(folder, f"{words} {stops}", folder / f"{name}-stopped")
            checkpoint = folder / f"{name}-stopped" / f"checkpoint-{STOPS_AFTER}"
            loads = "--mcore_adapter" if LORA in words else "--mcore_model"
            goes_on = f"{loads} {checkpoint} --finetune false --no_load_optim false --no_load_rng false"
            resumed = fine_tune(folder, f"{words} {goes_on}", folder / f"{name}-resumed")
            results[name] = Resumed(whole, stopped, resumed)
            print(name, results[name], flush=True)
    return results


def fine_tune(folder: Path, words: str, output: Path) -> Training:
    """Five steps of `megatron sft`, and an evaluation."""
    from megatron.core import parallel_state
    from swift.dataset import packing
    from swift.megatron import megatron_rlhf_main, megatron_sft_main
    from swift.megatron.callbacks import megatron_callbacks_map
    from swift.megatron.trainers.kto_trainer import DummyKTOTrainer

    training = Training()
    megatron_callbacks_map["watch"] = lambda trainer: _watch(trainer, training)
    DummyKTOTrainer.gather_for_metrics = lambda trainer, mean: mean
    packing._resolve_mp_context = lambda _: multiprocessing.get_context("fork")
    stays = Patch("torch.distributed.destroy_process_group", lambda *_, **__: None, "the next training needs it")
    with patched([stays]), answered_by_a_stub():
        main = megatron_rlhf_main if "--rlhf_type" in words else megatron_sft_main
        main([*_command(folder, output).split(), *words.split()])
    parallel_state.destroy_model_parallel()
    return training


def _prepare(folder: Path) -> None:
    if dist.get_rank() == 0:
        save_qwen(folder / "qwen", VOCABULARY, has_scores=True)
        save_examples(folder)
    dist.barrier()


def _command(folder: Path, output: Path) -> str:
    return f"""
        --model {folder}/qwen --model_type qwen3 --template dummy --use_hf true --check_model false
        --dataset {folder}/training.jsonl --val_dataset {folder}/validation.jsonl --load_from_cache_file false
        --max_length {PACK} --truncation_strategy delete --dataset_num_proc 1 --dataloader_num_workers 0
        --pipeline_model_parallel_size 2 --micro_batch_size 1 --global_batch_size {MICROBATCHES}
        --train_iters {STEPS} --eval_iters 2 --eval_steps {STEPS} --save_steps {STEPS} --logging_steps 1
        --optimizer sgd --lr 0.1 --lr_decay_style constant --lr_warmup_iters 0 --tuner_type full
        --torch_dtype float32 --fp16 false --bf16 false --ddp_backend gloo --use_distributed_optimizer false
        --masked_softmax_fusion false --cross_entropy_loss_fusion false --apply_rope_fusion false
        --gradient_accumulation_fusion false --save_safetensors false --output_dir {output} --add_version false
        --callbacks watch
    """


def _watch(trainer: Any, training: Training) -> Any:
    """A callback of ms-swift's that fills in `training`."""
    from swift.megatron.callbacks.base import MegatronCallback

    memory = LiveBytes()

    class Watch(MegatronCallback):
        def on_step_begin(self) -> None:
            if self.state.iteration == self.args.train_iters - 1:
                memory.__enter__()

        def on_step_end(self) -> None:
            if self.state.iteration == self.args.train_iters:
                memory.__exit__(None, None, None)
                training.peak_bytes = memory.peak

        def on_log(self, logs: dict[str, Any]) -> None:
            if "grad_norm" in logs:
                training.norms.append(float(logs["grad_norm"]))
            if "loss" in logs:
                training.losses.append(float(logs["loss"]))
            if "eval_loss" in logs:
                training.evaluated.append(float(logs["eval_loss"]))

    return Watch(trainer)


def save_examples(folder: Path) -> None:
    """Conversations of a question and an answer, as lines of JSON."""
    draw = random.Random(0)
    for name, copies in (("training", 6), ("validation", 2)):
        lines = []
        for number, length in enumerate(LENGTHS * copies):
            numbers = [str(draw.randrange(4, VOCABULARY)) for _ in range(length)]
            question = " ".join(numbers[: length // 3])
            answer = " ".join(numbers[length // 3 :])
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rejected = " ".join(numbers[length // 3 : 0 : -1])
            line = {"messages": messages, "rejected_response": rejected, "label": number % 3 > 0}  # of DPO, of KTO
            lines.append(json.dumps(line))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
