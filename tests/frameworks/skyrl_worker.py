"""Steps of SkyRL's Megatron worker on pipeline stages of a CPU.

Its classes run unmodified: `MegatronPolicyWorkerBase` from `__init__`, `init_worker_process_group` and `init_model` to
`forward`, `forward_backward`, `optim_step` and `save_hf_model`, with its micro-batches, packing, log-probabilities,
entropies and losses. What a CPU needs here:

- Every rank makes its worker, as SkyRL's actors in Ray do; only there their output goes to files.
- The double of Transformer Engine's kernels (support/te_double.py), since Megatron-Bridge builds its layers.
- fp32, gloo, and nothing that is fused on GPUs, by SkyRL's own configuration; its optimizer is SGD, which Megatron's
  distributed optimizer does not know, so that it is off.
- Two functions of flash-attn, which SkyRL imports for another backend.
- SkyRL takes Megatron-Bridge from its repository, which has two functions more than the newest release: they add up
  gradients of experts' adapters over expert-parallel ranks, and there are none of these here.
- Megatron's local attention, which reads no packed sequences, runs document by document (`OWN_ATTENTION`).
- Rollouts and advantages are random numbers.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from frameworks.empty_modules import empty_modules
from frameworks.live_bytes import LiveBytes
from frameworks.own_attention import forget_backend
from frameworks.policies import LENGTHS, VOCABULARY, PolicyTraining, exported_weights, trained_twice

STEPS, NUM_LAYERS = 3, 4


@dataclass(frozen=True)
class Case:
    """SkyRL's loss, what it takes beside by the words of its command line, and the parallel sizes."""

    loss: str = "regular"
    overrides: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = (("pipeline_model_parallel_size", 2),)
    own_sizes: tuple[tuple[str, int], ...] | None = None  # of the same without segments, if they differ
    transformer: tuple[tuple[str, Any], ...] = ()  # of `transformer_config_kwargs`
    schedule: str = "1f1b"
    has_experts: bool = False
    replays_routes: bool = False


def sizes(**given: int) -> tuple[tuple[str, int], ...]:
    return tuple(given.items())


ENTROPY = "trainer.algorithm.use_entropy_loss=true"
DYNAMIC = "trainer.max_tokens_per_microbatch=128"
PADDED = "trainer.remove_microbatch_padding=false"
FUSED = "trainer.fused_lm_head_logprob=true"
LORA = ("trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.alpha=8")

CASES = {
    "packed": Case(overrides=(ENTROPY, DYNAMIC)),
    "packed-fixed-batches": Case(overrides=(ENTROPY,)),
    "packed-zb-h1": Case(overrides=(ENTROPY, DYNAMIC), schedule="zb-h1"),
    "padded": Case(overrides=(ENTROPY, PADDED)),
    "no-recomputation": Case(overrides=(ENTROPY, DYNAMIC, "trainer.gradient_checkpointing=false")),
    "sequence-loss": Case(loss="gspo", overrides=(DYNAMIC,)),
    "fine-tuning": Case(loss="cross_entropy", overrides=(DYNAMIC,)),
    "fused-head": Case(overrides=(DYNAMIC, FUSED)),
    "fused-head-zb-h1": Case(overrides=(DYNAMIC, FUSED), schedule="zb-h1"),
    "fused-head-padded": Case(overrides=(PADDED, FUSED)),
    "tensor-parallel": Case(overrides=(ENTROPY, DYNAMIC), sizes=sizes(tensor_model_parallel_size=2)),
    # Without an entropy, of which SkyRL reports this rank's share.
    "context-parallel": Case(
        overrides=(DYNAMIC,),
        sizes=sizes(context_parallel_size=2),
        own_sizes=sizes(tensor_model_parallel_size=2),
        transformer=(("cp_comm_type", "a2a"),),
    ),
    "lora": Case(overrides=(ENTROPY, DYNAMIC, *LORA)),
    "experts": Case(overrides=(ENTROPY, DYNAMIC), has_experts=True),
    "experts-padded": Case(overrides=(ENTROPY, PADDED), has_experts=True),
    "replayed-routes": Case(overrides=(ENTROPY, DYNAMIC), has_experts=True, replays_routes=True),
    "replayed-routes-padded": Case(overrides=(ENTROPY, PADDED), has_experts=True, replays_routes=True),
}


def with_segments_and_without(
    folder: Path, names: tuple[str, ...] = tuple(CASES)
) -> dict[str, tuple[PolicyTraining, PolicyTraining]]:
    """Every case, or those of some names."""
    return trained_twice(folder, {name: CASES[name] for name in names}, train)


def train(folder: Path, case: Case, exports_to: Path) -> PolicyTraining:
    training = PolicyTraining()
    worker = worker_of(folder, case)
    _note_gradients(worker, training)
    training.before = _log_probs(worker, case)
    memory = LiveBytes()
    for step in range(STEPS):
        with memory if step == STEPS - 1 else nullcontext():
            name = case.loss if case.loss == "cross_entropy" else None
            output = worker.forward_backward(batch(case, step), loss_fn=name)
        training.losses.append(output.metrics["loss" if name else "final_loss"])
        training.norms.append(worker.optim_step())
    training.peak_bytes = memory.peak
    training.after = _log_probs(worker, case)
    if not any("lora" in word for word in case.overrides):
        worker.save_hf_model(str(exports_to), worker.tokenizer)
        training.exported = exported_weights(exports_to)
    return training


def worker_of(folder: Path, case: Case) -> Any:
    """SkyRL's worker with the weights in `folder`."""
    _complete_bridge()
    with empty_modules("flash_attn", "flash_attn.bert_padding", pad_input=None, unpad_input=None):
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase
        from skyrl.train.utils import ray_logging

    forget_backend()
    ray_logging.redirect_actor_output_to_file = lambda: None
    parallel_state.destroy_model_parallel()
    _forget_routes()
    worker = MegatronPolicyWorkerBase(
        cfg=config_of(folder, case),
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=os.environ["MASTER_PORT"],
        sequence_parallel_size=1,
    )
    worker.init_worker_process_group()
    worker.init_model(str(folder))
    return worker


def config_of(folder: Path, case: Case) -> Any:
    """SkyRL's configuration of its trainer."""
    from megatron.core.transformer.enums import AttnBackend
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.config.config import MegatronDDPConfig

    @dataclass
    class PlainDDPConfig(MegatronDDPConfig):
        use_distributed_optimizer: bool = False

    megatron = "trainer.policy.megatron_config"
    config = SkyRLTrainConfig.from_cli_overrides(
        [
            "trainer.strategy=megatron",
            "trainer.bf16=false",
            "trainer.logger=console",
            f"trainer.policy.model.path={folder}",
            "trainer.micro_train_batch_size_per_gpu=2",
            "trainer.micro_forward_batch_size_per_gpu=2",
            "trainer.policy.optimizer_config.lr=0.1",
            f"{megatron}.empty_cuda_cache=false",
            f"{megatron}.moe_enable_routing_replay={str(case.replays_routes).lower()}",
            f"trainer.algorithm.policy_loss_type={case.loss}",
            "trainer.algorithm.use_kl_loss=true",
            "trainer.algorithm.kl_loss_coef=0.1",
            "trainer.algorithm.temperature=0.9",
            *(f"{megatron}.{name}={size}" for name, size in case.sizes),
            *case.overrides,
        ]
    ).trainer
    config.policy.megatron_config.ddp_config = PlainDDPConfig()
    # Not Adam, whose step for a gradient of rounding errors alone is as long as for any other.
    config.policy.megatron_config.optimizer_config_kwargs |= {
        "optimizer": "sgd",
        "bf16": False,
        "params_dtype": "float32",
        "use_distributed_optimizer": False,
    }
    config.policy.megatron_config.transformer_config_kwargs |= {
        "attention_backend": AttnBackend.local,
        "params_dtype": torch.float32,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        **dict(case.transformer),
    }
    return config


def batch(case: Case, seed: int) -> Any:
    """Random rollouts, padded at the left, as SkyRL's trainer gives them to a worker."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.utils.packed_tensor import PackedTensor

    random = torch.Generator().manual_seed(seed)
    longest = max(prompt + response for prompt, response in LENGTHS)
    longest_response = max(response for _, response in LENGTHS)
    attention_mask = torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    response_mask = torch.zeros(len(LENGTHS), longest_response, dtype=torch.long)
    for row, (prompt, response) in enumerate(LENGTHS):
        attention_mask[row, longest - prompt - response :] = 1
        response_mask[row, longest_response - response :] = 1

    def of_responses() -> torch.Tensor:
        return torch.randn(response_mask.shape, generator=random) * response_mask

    data = {
        "sequences": torch.randint(2, VOCABULARY, attention_mask.shape, generator=random) * attention_mask,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "loss_mask": response_mask / response_mask.sum() if case.loss == "cross_entropy" else response_mask.float(),
        "action_log_probs": of_responses() - 4,
        "base_action_log_probs": of_responses() - 4,
        "advantages": of_responses() / response_mask.sum(),
    }
    if case.replays_routes:
        ends = torch.tensor([0, *(sum(each) for each in LENGTHS)]).cumsum(0, dtype=torch.int32)
        scores = torch.rand(int(ends[-1]), NUM_LAYERS, 4, generator=random)
        data["rollout_expert_indices"] = PackedTensor(scores.topk(2).indices.to(torch.int16), ends)
        data["router_padding_mask"] = attention_mask == 0
    batch = TrainingInputBatch(data)
    batch.metadata = {"response_length": longest_response}
    return batch


def _log_probs(worker: Any, case: Case) -> list[torch.Tensor]:
    """Of the responses of a batch, on the last stage; other stages give numbers without meaning."""
    outputs = worker.forward(batch(case, STEPS)).loss_fn_outputs
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return []
    return [
        torch.tensor(output["logprobs"][-response:]) for output, (_, response) in zip(outputs, LENGTHS, strict=True)
    ]


def _note_gradients(worker: Any, training: PolicyTraining) -> None:
    """Keep the gradients of the first step in `training`, before the optimizer clips them."""
    step: Callable = worker.strategy.optimizer_step

    def noting(*args: Any, **kwargs: Any) -> Any:
        training.note_gradients(worker.actor_module, lambda weight: weight.main_grad)
        return step(*args, **kwargs)

    worker.strategy.optimizer_step = noting


def _forget_routes() -> None:
    """Of the models before: Megatron keeps the routers of all models in one list."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()


def _complete_bridge() -> None:
    """Give Megatron-Bridge what SkyRL imports from a newer one."""
    from megatron.bridge.peft import utils
    from megatron.core.distributed import finalize_model_grads

    utils.enable_expert_parallel_grad_sync_in_finalize = lambda model: None
    utils.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
