"""verl's PPO trainer, as its user starts it: the words of its command line, its data, and what it logs."""

import json
import random
from pathlib import Path

from frameworks.models import save_qwen
from frameworks.policies import VOCABULARY

# Of the policy before an update (entropy) and in it, of its reference (kl_loss), and of the critic.
OF_WORKERS = (
    *("actor/entropy", "actor/entropy_loss", "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm"),
    *("rollout_corr/training_log_ppl", "critic/values/mean", "critic/values/max", "critic/values/min"),
    *("critic/loss", "critic/vf_loss", "critic/vpred_mean", "critic/grad_norm"),
)
# Of the rollouts that a step trains on.
OF_ROLLOUTS = ("perf/total_num_tokens", "response_length/mean", "critic/score/mean", "critic/score/max")
STEPS, PROMPTS = 2, 4  # in each step; every prompt gets two responses
PROMPT_LENGTHS = (5, 9, 3, 12)


def words(folder: Path, name: str) -> list[str]:
    """For a pipeline of two stages of a policy, its reference and a critic, which logs to a file of this name."""
    return f"""
        model_engine=megatron algorithm.adv_estimator=gae
        data.train_files={folder}/prompts.parquet data.val_files={folder}/prompts.parquet
        data.train_batch_size={PROMPTS} data.max_prompt_length=16 data.max_response_length=96
        data.dataloader_num_workers=0 data.shuffle=False
        actor_rollout_ref.model.path={folder}/model critic.model.path={folder}/model
        +actor_rollout_ref.model.override_config.attn_implementation=eager
        +critic.model.override_config.attn_implementation=eager
        actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS} actor_rollout_ref.actor.use_dynamic_bsz=True
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128 critic.ppo_max_token_len_per_gpu=128
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.entropy_coeff=0.01
        actor_rollout_ref.actor.ppo_epochs=2
        {_engine("actor_rollout_ref.actor")} {_engine("critic")}
        {_optimizer("actor_rollout_ref.actor")} {_optimizer("critic")}
        actor_rollout_ref.rollout.name=fixed actor_rollout_ref.rollout.n=2
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.agent.num_workers=1
        reward.num_workers=1 reward.custom_reward_function.path={Path(__file__).parent}/verl_reward.py
        transfer_queue.backend.SimpleStorage.num_data_storage_units=1
        trainer.device=cpu trainer.n_gpus_per_node=2 trainer.logger=[console,file] trainer.val_before_train=False
        trainer.total_epochs=1 trainer.total_training_steps={STEPS} trainer.resume_mode=disable
        trainer.default_local_dir={folder}/{name} hydra.run.dir={folder}/hydra
        ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.resources.NPU=2
        +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000
    """.split()


def _engine(role: str) -> str:
    engine = f"{role}.megatron"
    return f"""
        {engine}.pipeline_model_parallel_size=2 {engine}.vanilla_mbridge=True
        +{engine}.override_transformer_config.masked_softmax_fusion=False
        +{engine}.override_transformer_config.gradient_accumulation_fusion=False
    """


def _optimizer(role: str) -> str:
    return f"{role}.optim.lr=0.1 +{role}.optim.override_optimizer_config.adam_eps=1.0"


def save_model_and_prompts(folder: Path) -> None:
    import pandas
    from transformers import AutoTokenizer

    save_qwen(folder / "model", VOCABULARY)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(["<|im_end|>", "\n"])  # which verl looks up for a Qwen3; no prompt has them
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = []
    for index in range(STEPS * PROMPTS):
        words = [str(draw.randrange(4, VOCABULARY)) for _ in range(PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)])]
        prompt = [{"role": "user", "content": " ".join(words)}]
        rows.append({"prompt": prompt, "data_source": "numbers", "reward_model": {"ground_truth": words[0]}})
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")


def steps_of(metrics: Path) -> list[dict[str, float]]:
    """What verl's logger has in a file of each step: of its rollouts, and what Megatron's workers computed."""
    lines = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return [{name: line[name] for name in (*OF_ROLLOUTS, *OF_WORKERS)} for line in lines]
