"""Steps of verl's Megatron engine on two pipeline stages of a CPU.

verl's classes run unmodified: the engine from its `__init__` and `initialize` to `train_batch` and `infer_batch`, its
optimizer, its micro-batches, forwards, and losses. What the program around it does here and what a CPU needs:

- Every rank makes its engine, as a worker does (verl_workers.py has those in Ray).
- mbridge builds the model of Megatron's local layers, not of Transformer Engine's, and is told the names of their
  norms; a type of model that it compares with, and that Megatron 0.19 no longer has, is there again. Megatron-Bridge
  builds Transformer Engine's, on the double of its kernels (support/te_double.py).
- `McoreEngineConfig` takes bfloat16 or float16, and gets float32 after its checks.
- The memory of the GPU, which verl logs, has no bytes.
- Megatron's local attention, which reads no packed sequences, runs document by document (`OWN_ATTENTION`).
- Rollouts and advantages are random numbers.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import ModelType

from frameworks.both_ways import both_ways
from frameworks.equal_steps import Training
from frameworks.live_bytes import LiveBytes
from frameworks.models import save_dense_and_experts
from frameworks.own_attention import forget_backend
from frameworks.policies import LENGTHS, VOCABULARY

STEPS = 5


@dataclass(frozen=True)
class Case:
    """verl's loss, whether padding is removed, whether micro-batches are filled up to so many tokens; parallel sizes of
    McoreEngineConfig, and those of the same without segments if they differ."""

    loss: str
    remove_padding: bool = True
    dynamic: bool = True
    sizes: tuple[tuple[str, int], ...] = (("pipeline_model_parallel_size", 2),)
    own_sizes: tuple[tuple[str, int], ...] | None = None
    # Who builds the model and loads its weights: mbridge, or verl's default, Megatron-Bridge.
    has_mbridge: bool = True
    has_experts: bool = False
    has_lora: bool = False


def sizes(**given: int) -> tuple[tuple[str, int], ...]:
    return tuple(given.items())


CASES = {
    "sft": Case("sft"),
    "sft-padded": Case("sft", remove_padding=False, dynamic=False),
    "token-mean": Case("token-mean"),
    "token-mean-fixed-batches": Case("token-mean", dynamic=False),
    "token-mean-padded": Case("token-mean", remove_padding=False, dynamic=False),
    "sequence-mean": Case("seq-mean-token-mean"),
    "sequence-mean-padded": Case("seq-mean-token-mean", remove_padding=False),
    "critic": Case("value"),
    "critic-padded": Case("value", remove_padding=False, dynamic=False),
    "token-mean-chunks": Case(
        "token-mean", sizes=sizes(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    ),
    "token-mean-tp": Case("token-mean", sizes=sizes(tensor_model_parallel_size=2)),
    # Megatron's local attention knows no context parallelism.
    "token-mean-cp": Case(
        "token-mean", sizes=sizes(context_parallel_size=2), own_sizes=sizes(tensor_model_parallel_size=2)
    ),
}

# By Megatron-Bridge, which alone knows LoRA.
CASES_OF_THE_DEFAULT = {
    "default-bridge": Case("token-mean", has_mbridge=False),
    "experts": Case("token-mean", has_mbridge=False, has_experts=True),
    "experts-padded": Case("token-mean", remove_padding=False, dynamic=False, has_mbridge=False, has_experts=True),
    "lora": Case("token-mean", has_mbridge=False, has_lora=True),
    "experts-lora": Case("token-mean", has_mbridge=False, has_experts=True, has_lora=True),
}


@dataclass
class VerlTraining(Training):
    """With what the rank that has losses infers before and after the steps."""

    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    without_adapters: dict[str, torch.Tensor] = field(default_factory=dict)  # after the steps, with LoRA


def with_mbridge(folder: Path) -> dict[str, tuple[VerlTraining, VerlTraining]]:
    return _with_segments_and_without(folder, CASES)


def with_megatron_bridge(folder: Path) -> dict[str, tuple[VerlTraining, VerlTraining]]:
    return _with_segments_and_without(folder, CASES_OF_THE_DEFAULT)


def _with_segments_and_without(folder: Path, cases: dict[str, Case]) -> dict[str, tuple[VerlTraining, VerlTraining]]:
    """Every case, with segments of 16 tokens and without segments."""
    save_dense_and_experts(folder, VOCABULARY)
    results = {}
    for name, case in cases.items():
        own_case = replace(case, sizes=case.own_sizes or case.sizes)
        results[name] = both_ways(name, partial(train, folder, case), partial(train, folder, own_case))
    return results


def train(folder: Path, case: Case) -> VerlTraining:
    loss = case.loss
    dynamic = case.dynamic
    engine = engine_of(folder / ("experts" if case.has_experts else "dense"), case)
    loss_function = loss_of(loss)
    before = inferred(engine, loss, dynamic)
    losses = []
    norms = []
    memory = LiveBytes()
    for step in range(STEPS):
        data = batch(loss, step, dynamic)
        with engine.train_mode(), memory if step == STEPS - 1 else nullcontext():
            result = engine.train_batch(data, loss_function)
        engine.lr_scheduler_step()
        if "grad_norm" in result.get("metrics", {}):
            losses.append(sum(result["loss"]))
            norms.append(float(result["metrics"]["grad_norm"]))
    after = inferred(engine, loss, dynamic)
    without_adapters = {}
    if case.has_lora:  # of the reference, as verl has it then
        with engine.disable_adapter():
            without_adapters = inferred(engine, loss, dynamic)
    return VerlTraining(
        losses=losses,
        norms=norms,
        peak_bytes=memory.peak,
        before=before,
        after=after,
        without_adapters=without_adapters,
    )


def engine_of(folder: Path, case: Case) -> Any:
    """verl's engine with the weights in `folder`."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

    if case.has_mbridge:
        build_local_layers()
    forget_backend()
    use_ranks(dict(case.sizes))
    torch.cuda.mem_get_info = lambda device=None: (0, 0)
    kind = MegatronEngineWithValueHead if case.loss == "value" else MegatronEngineWithLMHead
    engine = kind(*configs_of(folder, case))
    engine.initialize()
    return engine


def configs_of(folder: Path, case: Case) -> tuple[Any, Any, Any, Any]:
    """verl's configurations of the model, with weights in `folder`, of the engine, the optimizer and checkpoints."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    model_config = HFModelConfig(
        path=str(folder),
        model_type="value_model" if case.loss == "value" else "language_model",
        use_remove_padding=case.remove_padding,
        override_config={"attn_implementation": "eager"},
        lora={"type": "lora", "rank": 4, "alpha": 8} if case.has_lora else {},
    )
    not_on_a_cpu = {"masked_softmax_fusion": False, "gradient_accumulation_fusion": False}
    if not case.has_mbridge:
        not_on_a_cpu |= {"apply_rope_fusion": False, "moe_permute_fusion": False, "attention_backend": "local"}
    engine_config = McoreEngineConfig(
        vanilla_mbridge=case.has_mbridge,
        use_remove_padding=case.remove_padding,
        use_distributed_optimizer=False,
        override_transformer_config=not_on_a_cpu | {"cp_comm_type": "a2a"},  # which segments ask for
        **dict(case.sizes),
    )
    object.__setattr__(engine_config, "dtype", "float32")
    # Not Adam, whose step for a gradient of rounding errors alone is as long as for any other.
    optimizer_config = McoreOptimizerConfig(
        optimizer="sgd", lr=0.1, total_training_steps=STEPS, lr_decay_style="constant"
    )
    return model_config, engine_config, optimizer_config, CheckpointConfig()


def use_ranks(sizes: dict[str, int]) -> None:
    """Let verl assign ranks anew if there are groups of other sizes: it keeps those that it finds."""
    if sizes != _SIZES:
        parallel_state.destroy_model_parallel()
        _SIZES.clear()
        _SIZES.update(sizes)


_SIZES: dict[str, int] = {}  # of the groups that there are


def build_local_layers() -> None:
    """Have mbridge build Megatron's own layers, and load their weights."""
    from mbridge.core import llm_bridge
    from mbridge.models.qwen3 import Qwen3Bridge

    @wraps(get_gpt_decoder_block_spec)  # mbridge reads its parameters
    def local_layers(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, **options)

    llm_bridge.get_gpt_decoder_block_spec = local_layers
    layer = "model.layers.{layer_number}."
    Qwen3Bridge._OTHER_MAPPING = {"input_layernorm.weight": [layer + "input_layernorm.weight"]}
    Qwen3Bridge._MLP_MAPPING["pre_mlp_layernorm.weight"] = [layer + "post_attention_layernorm.weight"]
    ModelType.encoder_and_decoder = None


def loss_of(name: str) -> Any:
    """One of verl's loss functions, as its workers bind it to their configuration."""
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

    if name == "value":
        return partial(value_loss, config=CriticConfig(strategy="megatron", use_dynamic_bsz=True))
    actor = {"strategy": "megatron", "rollout_n": 1, "use_dynamic_bsz": True}
    if name == "sft":
        return partial(sft_loss, config=ActorConfig(**actor))
    config = ActorConfig(**actor, loss_agg_mode=name, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    return partial(ppo_loss, config=config)


def batch(loss: str, seed: int, dynamic: bool) -> Any:
    """Random rollouts, with what verl's trainer says of them."""
    from verl.utils import tensordict_utils as tu

    data = rollouts(LENGTHS, VOCABULARY, seed)
    if loss == "sft":
        # Of whole sequences, as verl's dataset for fine-tuning has it.
        masks = [torch.tensor([0] * prompt + [1] * response) for prompt, response in LENGTHS]
        data["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    tu.assign_non_tensor(
        data,
        temperature=0.9,
        calculate_entropy=loss not in ("sft", "value"),
        global_batch_size=len(LENGTHS),
        use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=128,
        micro_batch_size_per_gpu=2,
    )
    return data


def rollouts(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int) -> Any:
    """Random prompts and responses of these lengths, as verl's trainer hands them to a worker: prompts padded at the
    left, responses at the right, then without padding."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    random = torch.Generator().manual_seed(seed)
    longest_prompt, longest_response = (max(each) for each in zip(*lengths, strict=True))
    attention_mask = torch.zeros(len(lengths), longest_prompt + longest_response, dtype=torch.long)
    for row, (prompt, response) in enumerate(lengths):
        attention_mask[row, longest_prompt - prompt : longest_prompt + response] = 1
    tokens = torch.randint(2, vocabulary, attention_mask.shape, generator=random) * attention_mask
    response_mask = attention_mask[:, longest_prompt:]

    def of_responses() -> torch.Tensor:
        return torch.randn(response_mask.shape, generator=random) * response_mask

    data = tu.get_tensordict(
        {
            "input_ids": tokens,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "prompts": tokens[:, :longest_prompt],
            "responses": tokens[:, longest_prompt:],
            "response_mask": response_mask,
            "old_log_probs": of_responses() - 4,
            "ref_log_prob": of_responses() - 4,
            "advantages": of_responses(),
            "values": of_responses(),
            "returns": of_responses(),
        }
    )
    return left_right_2_no_padding(data)


def inferred(engine: Any, loss: str, dynamic: bool) -> dict[str, torch.Tensor]:
    """Log-probabilities and entropies, or values, of a batch, by a forward alone, on the last stage."""
    from verl.utils import tensordict_utils as tu

    data = batch(loss, STEPS, dynamic)
    if loss != "value":
        tu.assign_non_tensor(data, calculate_entropy=True)
    with engine.eval_mode():
        result = engine.infer_batch(data)
    found = result.get("model_output", {})
    # What follows the last token of a sequence depends on how packs are aligned; no loss reads it.
    return {name: torch.cat([each[:-1] for each in value.unbind()]) for name, value in found.items()}
