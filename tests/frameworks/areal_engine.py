"""Steps of AReaL's Megatron engines on pipeline stages of a CPU.

Its classes run unmodified: `MegatronPPOActor`, `MegatronLMEngine` and `MegatronDPOEngine` from `__init__` and
`initialize` to log-probabilities, advantages, updates and `save`, with its micro-batches, packing and losses. What the
program around it does here and what a CPU needs:

- Every rank makes its engine; AReaL's own platform for a CPU is the one that it finds.
- mbridge builds the model of Megatron's local layers, not of Transformer Engine's (verl_engine.py); Megatron-Bridge
  builds Transformer Engine's, on the double of its kernels (support/te_double.py). Neither fuses what only GPUs do.
- AReaL numbers its device, which PyTorch takes for a GPU; here it is the CPU.
- Megatron's local attention, which reads no packed sequences, runs document by document (`OWN_ATTENTION`).
- Rollouts and rewards are random numbers.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from frameworks.empty_modules import empty_modules
from frameworks.live_bytes import LiveBytes
from frameworks.own_attention import forget_backend
from frameworks.policies import LENGTHS, VOCABULARY, PolicyTraining, exported_weights, trained_twice
from frameworks.verl_engine import build_local_layers

STEPS = 3
NOT_ON_A_CPU = {"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False}


@dataclass(frozen=True)
class Case:
    """The engine by its name in AReaL, what it is told beside, and its parallel sizes."""

    engine: str = "MegatronPPOActor"
    options: tuple[tuple[str, Any], ...] = ()
    megatron: tuple[tuple[str, Any], ...] = ()  # of MegatronEngineConfig
    sizes: tuple[tuple[str, int], ...] = (("pipeline_parallel_size", 2),)
    own_sizes: tuple[tuple[str, int], ...] | None = None  # of the same without segments, if they differ
    bridge: str = "mbridge"
    schedule: str = "1f1b"
    has_experts: bool = False


def named(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


CASES = {
    "policy": Case(),
    "policy-zb-h1": Case(schedule="zb-h1"),
    "policy-recomputed": Case(options=named(gradient_checkpointing=True)),
    "policy-sequence-level": Case(options=named(importance_sampling_level="sequence")),
    "policy-decoupled": Case(options=named(use_decoupled_loss=True)),
    "policy-chunks": Case(
        megatron=named(virtual_pipeline_parallel_size=2),
    ),
    "policy-overlap": Case(megatron=named(ddp="overlap")),
    "policy-tensor-parallel": Case(sizes=named(tensor_parallel_size=2)),
    # Its loss, of which a rank has a share, and log-probabilities, which AReaL 1.0.4 mixes up, are not compared.
    "policy-context-parallel": Case(
        sizes=named(context_parallel_size=2), own_sizes=named(tensor_parallel_size=2), bridge="megatron-bridge"
    ),
    "fine-tuning": Case(engine="MegatronLMEngine"),
    "preferences": Case(engine="MegatronDPOEngine"),
    "default-bridge": Case(bridge="megatron-bridge"),
    "experts": Case(bridge="megatron-bridge", has_experts=True),
    "lora": Case(bridge="megatron-bridge", options=named(use_lora=True, lora_rank=4, lora_alpha=8)),
}


def with_segments_and_without(
    folder: Path, names: tuple[str, ...] = tuple(CASES)
) -> dict[str, tuple[PolicyTraining, PolicyTraining]]:
    """Every case, or those of some names."""
    return trained_twice(folder, {name: CASES[name] for name in names}, train)


def train(folder: Path, case: Case, saves_to: Path) -> PolicyTraining:
    training = PolicyTraining()
    engine = engine_of(folder, case)
    _note(engine, training)
    training.before = _inferred(engine, case)
    memory = LiveBytes()
    for step in range(STEPS):
        training.losses.append(0.0)
        with memory if step == STEPS - 1 else nullcontext():
            _update(engine, case, rollouts(step))
    training.peak_bytes = memory.peak
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        training.losses.clear()
    training.after = _inferred(engine, case)
    if case.engine == "MegatronPPOActor" and not dict(case.options).get("use_lora"):
        from areal.api import SaveLoadMeta

        engine.save(
            SaveLoadMeta(path=str(saves_to), weight_format="hf", with_optim=False, tokenizer=None, base_model_path=None)
        )
        training.exported = exported_weights(saves_to)
    return training


def engine_of(folder: Path, case: Case) -> Any:
    """AReaL's engine with the weights in `folder`."""
    with empty_modules("swanlab", "trackio"):  # loggers
        import areal.utils.stats_logger  # noqa: F401
    from areal import engine as engines
    from areal.api import FinetuneSpec, ParallelStrategy

    build_local_layers()
    _fit_bridges()
    forget_backend()
    kind = getattr(engines, case.engine)
    on_the_cpu = type(case.engine, (kind,), {"device": property(_cpu, lambda self, device: None)})
    engine = on_the_cpu(config_of(folder, case))
    strategy = ParallelStrategy(**dict(case.sizes))
    _use_ranks(strategy, engine.mcore_config.virtual_pipeline_parallel_size)
    engine.create_process_group(strategy)
    engine.initialize(addr=None, ft_spec=FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1))
    return engine


def config_of(folder: Path, case: Case) -> Any:
    """AReaL's configuration of the engine."""
    from areal.api import cli_args

    options = dict(
        experiment_name="segments",
        trial_name="cpu",
        path=str(folder),
        dtype="float32",
        temperature=0.9,
        mb_spec=cli_args.MicroBatchSpec(max_tokens_per_mb=128),
        megatron=cli_args.MegatronEngineConfig(
            **{
                "bridge_type": case.bridge,
                "recompute_granularity": None,  # Megatron-Bridge gets it also without gradient_checkpointing
                "recompute_method": None,
                "recompute_num_layers": None,
                **dict(case.megatron),
                "ddp": cli_args.DistributedDataParallelConfig(
                    overlap_grad_reduce=dict(case.megatron).get("ddp") == "overlap",
                ),
            }
        ),
        # Without a large epsilon Adam's step for a gradient of rounding errors is as long as for any other.
        optimizer=cli_args.OptimizerConfig(lr=0.1, eps=1.0, warmup_steps_proportion=0.0),
    )
    options |= dict(case.options)
    if options.get("gradient_checkpointing"):
        options["megatron"].recompute_granularity = "full"
        options["megatron"].recompute_method = "uniform"
        options["megatron"].recompute_num_layers = 1
    if case.engine == "MegatronPPOActor":
        algorithm = {"ppo_n_minibatches": 1, "kl_ctl": 0.1, "use_decoupled_loss": False}
        return cli_args.PPOActorConfig(**(algorithm | options))
    if case.engine == "MegatronDPOEngine":
        return cli_args.DPOEngineConfig(**options)
    return cli_args.TrainEngineConfig(**options)


def rollouts(seed: int) -> list[dict[str, torch.Tensor]]:
    """Random trajectories, as AReaL's workflows give them: a batch [1, tokens] each."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for prompt, response in LENGTHS:
        length = prompt + response
        of_response = torch.tensor([[0] * prompt + [1] * response])
        found.append(
            {
                "input_ids": torch.randint(2, VOCABULARY, (1, length), generator=random),
                "attention_mask": torch.ones(1, length, dtype=torch.bool),
                "loss_mask": of_response,
                "logprobs": (torch.randn(1, length, generator=random) - 4) * of_response,
                "ref_logp": (torch.randn(1, length, generator=random) - 4) * of_response,
                "prox_logp": (torch.randn(1, length, generator=random) - 4) * of_response,
                "versions": torch.zeros(1, length, dtype=torch.int),
                "rewards": torch.randn(1, generator=random),
                "values": torch.randn(1, length, generator=random),
            }
        )
    return found


def _update(engine: Any, case: Case, data: list[dict[str, torch.Tensor]]) -> None:
    """One step of the engine's own algorithm."""
    if case.engine == "MegatronPPOActor":
        engine.ppo_update(engine.compute_advantages(data))
    elif case.engine == "MegatronLMEngine":
        engine.train_lm([_only(trajectory, "input_ids", "attention_mask", "loss_mask") for trajectory in data])
    else:
        names = ("input_ids", "attention_mask", "loss_mask", "ref_logprobs")
        engine.train_dpo([_only(trajectory | {"ref_logprobs": trajectory["ref_logp"]}, *names) for trajectory in data])


def _inferred(engine: Any, case: Case) -> list[torch.Tensor]:
    """Log-probabilities of a batch, without what follows the last token of a rollout, which no loss reads."""
    data = [_only(trajectory, "input_ids", "attention_mask", "loss_mask") for trajectory in rollouts(STEPS)]
    if case.engine == "MegatronLMEngine" or case.own_sizes is not None:
        return []
    found = engine.compute_logp(data)
    return [
        of_rollout[..., : prompt + response - 1].flatten()
        for of_rollout, (prompt, response) in zip(found, LENGTHS, strict=True)
    ]


def _only(trajectory: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: trajectory[name] for name in names}


def _note(engine: Any, training: PolicyTraining) -> None:
    """Keep the losses, norms and first gradients of the engine's steps in `training`."""
    loss_of: Callable = engine._compute_logprobs_and_loss
    step: Callable = engine.optimizer_step

    def noting_loss(*args: Any, **kwargs: Any) -> Any:
        loss = loss_of(*args, **kwargs)
        if torch.is_grad_enabled():
            training.losses[-1] += loss.item()
        return loss

    def noting_step() -> Any:
        training.note_gradients(engine.model, _gradient)
        statistics = step()
        training.norms.append(statistics["grad_norm"])
        return statistics

    engine._compute_logprobs_and_loss = noting_loss
    engine.optimizer_step = noting_step


def _gradient(weight: Any) -> torch.Tensor:
    """Also of adapters, which AReaL adds when Megatron has wrapped the model."""
    return weight.main_grad if hasattr(weight, "main_grad") else weight.grad


def _cpu(engine: Any) -> torch.device:
    return torch.device("cpu")


def _use_ranks(strategy: Any, chunks: int) -> None:
    """Assign ranks anew, as an engine does for the first one of a process."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=strategy.tensor_parallel_size,
        pipeline_model_parallel_size=strategy.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=strategy.context_parallel_size,
        order="tp-cp-ep-dp-pp",
    )
    model_parallel_cuda_manual_seed(0)


def _fit_bridges() -> None:
    """Have both bridges build models for a CPU."""
    import mbridge
    from megatron.bridge import AutoBridge
    from megatron.core.transformer.enums import AttnBackend

    if hasattr(mbridge.AutoBridge, "fits_a_cpu"):
        return
    mbridge.AutoBridge.fits_a_cpu = True
    from_pretrained = mbridge.AutoBridge.from_pretrained
    to_provider = AutoBridge.to_megatron_provider

    def fitted_bridge(*args: Any, **kwargs: Any) -> Any:
        bridge = from_pretrained(*args, **kwargs)
        bridge.hf_config.rope_theta = bridge.hf_config.rope_parameters["rope_theta"]  # as transformers 4 has it
        bridge.dtype = torch.float32  # which AReaL sets when the configuration is already made
        bridge.set_extra_args(**NOT_ON_A_CPU)
        return bridge

    def fitted_provider(bridge: Any, **kwargs: Any) -> Any:
        provider = to_provider(bridge, **kwargs)
        settings = NOT_ON_A_CPU | {"attention_backend": AttnBackend.local, "moe_permute_fusion": False}
        for name, value in (settings | {"params_dtype": torch.float32, "cp_comm_type": "a2a"}).items():
            setattr(provider, name, value)
        provider.bf16 = provider.fp16 = False
        return provider

    mbridge.AutoBridge.from_pretrained = staticmethod(fitted_bridge)
    AutoBridge.to_megatron_provider = fitted_provider
