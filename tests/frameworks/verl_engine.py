"""Steps of verl's Megatron engine on two pipeline stages of a CPU.

verl's classes run unmodified: the engine from its `__init__` and `initialize` to `train_batch` and `infer_batch`, its
optimizer, its micro-batches, forwards, and losses. What the program around it does here and what a CPU needs:

- There are no Ray workers: every rank makes its engine, as a worker does.
- mbridge builds the model of Megatron's local layers, not of Transformer Engine's, and is told the names of their
  norms; a type of model that it compares with, and that Megatron 0.19 no longer has, is there again.
- `McoreEngineConfig` takes bfloat16 or float16, and gets float32 after its checks.
- The memory of the GPU, which verl logs, has no bytes.
- Megatron's local attention, which reads no packed sequences, runs document by document (`OWN_ATTENTION`).
- Rollouts and advantages are random numbers.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import ModelType
from torch.nn.functional import scaled_dot_product_attention

from frameworks.installed import installed
from frameworks.live_bytes import LiveBytes
from frameworks.models import save_qwen
from megatron.seq1f1b.process.patches import patched, wrapping

VOCABULARY, STEPS = 64, 5
# Tokens of the prompts and responses of a batch: a few long rollouts among short ones.
LENGTHS = ((5, 90), (9, 20), (3, 7), (12, 60), (6, 33), (10, 5), (4, 71), (8, 16))


@dataclass(frozen=True)
class Case:
    """verl's loss, whether padding is removed, whether micro-batches are filled up to so many tokens; parallel sizes of
    McoreEngineConfig, and those of the same without segments if they differ."""

    loss: str
    remove_padding: bool = True
    dynamic: bool = True
    sizes: tuple[tuple[str, int], ...] = (("pipeline_model_parallel_size", 2),)
    own_sizes: tuple[tuple[str, int], ...] | None = None


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


@dataclass(frozen=True)
class Training:
    """Of one rank; only one rank of the last stage has losses, gradient norms, and what it infers before and after the
    steps."""

    losses: list[float]
    norms: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    peak_bytes: int  # of tensors that live at once in the last step


def with_segments_and_without(folder: Path) -> dict[str, tuple[Training, Training]]:
    """Every case, with segments of 16 tokens and without segments."""
    if dist.get_rank() == 0:
        save_qwen(folder, VOCABULARY)
    dist.barrier()
    results = {}
    for name, case in CASES.items():
        with installed(segment_tokens=16):
            ours = train(folder, case)
        with patched([OWN_ATTENTION]):
            own = train(folder, case if case.own_sizes is None else replace(case, sizes=case.own_sizes))
        results[name] = ours, own
        print(name, ours.losses, own.losses, ours.norms, own.norms, ours.peak_bytes, own.peak_bytes, flush=True)
    return results


def _by_document(
    forward: Any,
    attention: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    packed_seq_params: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Attention of a pack, queries [t, h, d] and the output [t, h d]; of padded sequences Megatron's own."""
    if packed_seq_params is None:
        # verl's padding is at the end, so that its mask of tokens [b, s] says nothing to causal attention.
        return forward(attention, query, key, value, None, **options)
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    for start, end in pairwise(packed_seq_params.cu_seqlens_q_padded.tolist()):
        of_document = (
            query[start:end].transpose(0, 1),
            key[start:end].transpose(0, 1).repeat_interleave(repeats, dim=0),
            value[start:end].transpose(0, 1).repeat_interleave(repeats, dim=0),
        )
        outputs.append(scaled_dot_product_attention(*(each[None] for each in of_document), is_causal=True)[0])
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


OWN_ATTENTION = wrapping(
    "megatron.core.transformer.dot_product_attention.DotProductAttention.forward",
    _by_document,
    "takes no packs, and a mask [b, 1, s, s] where that of Transformer Engine reads none if it is causal",
)


def train(folder: Path, case: Case) -> Training:
    loss = case.loss
    dynamic = case.dynamic
    engine = engine_of(folder, loss == "value", case.remove_padding, dict(case.sizes))
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
    return Training(losses, norms, before, inferred(engine, loss, dynamic), memory.peak)


def engine_of(folder: Path, is_critic: bool, remove_padding: bool, sizes: dict[str, int]) -> Any:
    """verl's engine with the weights in `folder`, of parallel `sizes` by their names in McoreEngineConfig."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

    build_local_layers()
    use_ranks(sizes)
    torch.cuda.mem_get_info = lambda device=None: (0, 0)
    model_config = HFModelConfig(
        path=str(folder),
        model_type="value_model" if is_critic else "language_model",
        override_config={"attn_implementation": "eager"},
    )
    engine_config = McoreEngineConfig(
        vanilla_mbridge=True,
        use_remove_padding=remove_padding,
        use_distributed_optimizer=False,
        override_transformer_config={
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "cp_comm_type": "a2a",  # which segments ask for
        },
        **sizes,
    )
    object.__setattr__(engine_config, "dtype", "float32")
    # Not Adam, whose step for a gradient of rounding errors alone is as long as for any other.
    optimizer_config = McoreOptimizerConfig(
        optimizer="sgd", lr=0.1, total_training_steps=STEPS, lr_decay_style="constant"
    )
    kind = MegatronEngineWithValueHead if is_critic else MegatronEngineWithLMHead
    engine = kind(model_config, engine_config, optimizer_config, CheckpointConfig())
    engine.initialize()
    return engine


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
