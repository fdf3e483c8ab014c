"""Steps of Megatron-Bridge's own training loop on two pipeline stages of a CPU.

Its code runs unmodified: `finetune` and `pretrain` with the common part of its recipes, its datasets, packing, forward
step, loss, LoRA, checkpoints, and import and export of Hugging Face weights. What a CPU needs here:

- The double of Transformer Engine's kernels (support/te_double.py), since it builds Transformer Engine's layers.
- Megatron is initialized with `allow_no_cuda`, on gloo, in fp32, without what Megatron fuses on GPUs.
- Texts are numbers, and a Llama of four layers is made on the spot.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frameworks.equal_steps import Training
from frameworks.installed import installed
from frameworks.live_bytes import LiveBytes
from frameworks.models import save_llama
from frameworks.own_attention import forget_backend

VOCABULARY, STEPS = 128, 5
# Tokens of a row, or a pack; micro-batches of a step.
SEQUENCE, MICROBATCHES = 96, 4
# Tokens of an example: a few long ones among short ones.
LENGTHS = (80, 12, 25, 61, 7, 33, 90, 18, 44, 9)


@dataclass(frozen=True)
class Case:
    """What is trained, by the words of Megatron-Bridge's configuration."""

    is_fine_tuning: bool = True
    packs_offline: bool = False
    packs_in_batches: bool = False
    # Documents in packs start at multiples of it, and their boundaries are as many in every pack.
    aligns_to: int = 1
    has_old_metadata: bool = False
    has_lora: bool = False

    @property
    def is_packed(self) -> bool:
        return self.packs_offline or self.packs_in_batches


CASES = {
    "pretraining": Case(is_fine_tuning=False),
    "padded": Case(),
    "packed": Case(packs_offline=True),
    "packed-aligned": Case(packs_offline=True, aligns_to=8),
    "packed-old-metadata": Case(packs_offline=True, has_old_metadata=True),
    "packed-in-batches": Case(packs_in_batches=True),
    "lora": Case(packs_offline=True, has_lora=True),
}


@dataclass
class BridgeTraining(Training):
    """With the weights that are exported in the end."""

    exported: dict[str, torch.Tensor] = field(default_factory=dict)


def with_segments_and_without(folder: Path) -> dict[str, tuple[BridgeTraining, BridgeTraining]]:
    """Every case, by segments of 16 tokens, and by Megatron's own schedule and attention."""
    if dist.get_rank() == 0:
        save_llama(folder / "llama", VOCABULARY)
        save_examples(folder / "texts")
    dist.barrier()
    # The first install comes before the first import of Megatron-Bridge, as it does where `seq1f1b enable` has run.
    with installed(segment_tokens=16):
        _save_checkpoint(folder)
    results = {}
    for name, case in CASES.items():
        with installed(segment_tokens=16):
            ours = _train(folder, case, has_own_attention=False)
        if case.is_packed:
            # Neither knows packs on a CPU, so that whole packs run by this package.
            with installed(segment_tokens=4096):
                own = _train(folder, case, has_own_attention=False)
        else:
            own = _train(folder, case, has_own_attention=True)
        results[name] = ours, own
        print(name, ours.losses, own.losses, ours.norms, own.norms, ours.peak_bytes, own.peak_bytes, flush=True)
    return results


def _train(folder: Path, case: Case, has_own_attention: bool) -> BridgeTraining:
    """Five steps and an evaluation from the weights in `folder`, and then the weights in Hugging Face's format."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import initialize, setup
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    forget_backend()
    initialize.compile_helpers = lambda: None  # calls make, for which the wheel of megatron-core has no makefile
    setup.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    bridge = AutoBridge.from_hf_pretrained(folder / "llama", torch_dtype=torch.float32)
    config = _config(folder, case)
    config.model = bridge.to_megatron_provider(load_weights=not case.is_fine_tuning)
    _for_two_cpu_ranks(config, has_own_attention)
    if case.is_fine_tuning:
        config.checkpoint.pretrained_checkpoint = str(folder / "checkpoint")
    training = BridgeTraining()
    step = _with_old_metadata(forward_step) if case.has_old_metadata else forward_step
    train = finetune if case.is_fine_tuning else pretrain
    train(config, step, callbacks=[_watch(bridge, training)])
    return training


def _watch(bridge: Any, training: BridgeTraining) -> Any:
    """A callback of Megatron-Bridge's that fills in `training`."""
    from megatron.bridge.training.callbacks import Callback

    memory = LiveBytes()

    class Watch(Callback):
        def on_train_step_start(self, context: Any) -> None:
            if context.state.train_state.step == STEPS - 1:
                memory.__enter__()

        def on_train_step_end(self, context: Any) -> None:
            training.losses += [float(value) for value in context.loss_dict.values()]
            training.norms.append(float(context.grad_norm))
            if len(training.norms) == STEPS:
                memory.__exit__(None, None, None)
                training.peak_bytes = memory.peak

        def on_eval_end(self, context: Any) -> None:
            training.evaluated += [float(value) for value in (context.total_loss_dict or {}).values()]

        def on_train_end(self, context: Any) -> None:
            training.exported |= dict(bridge.export_hf_weights(context.model, cpu=True, show_progress=False))

    return Watch()


def _config(folder: Path, case: Case) -> Any:
    """A recipe's, but for the model."""
    from megatron.bridge.data.builders import (
        DirectHFSFTDatasetConfig,
        GPTSFTDatasetConfig,
        HFDatasetSourceConfig,
        PromptCompletionSFTPreprocessingConfig,
    )
    from megatron.bridge.data.packing import PackedSequenceSpecs
    from megatron.bridge.recipes.common import _peft_common, _pretrain_common, _sft_common

    if not case.is_fine_tuning:
        config = _pretrain_common()
        config.tokenizer.tokenizer_type = "NullTokenizer"
        config.tokenizer.vocab_size = VOCABULARY - 1
        config.tokenizer.use_tokenizer_vocab_size = False
        config.dataset.seq_length = SEQUENCE
        return config
    config = _peft_common() if case.has_lora else _sft_common()
    config.tokenizer.tokenizer_model = str(folder / "llama")
    texts = PromptCompletionSFTPreprocessingConfig(prompt_column="input", completion_column="output", separator=" ")
    if case.packs_in_batches:
        source = HFDatasetSourceConfig(
            path_or_dataset="json",
            split="train",
            load_kwargs={"data_files": {"train": str(folder / "texts" / "training.jsonl")}},
        )
        config.dataset = DirectHFSFTDatasetConfig(
            seq_length=SEQUENCE,
            source=source,
            validation_source=source,
            preprocessing=texts,
            do_test=False,
            enable_in_batch_packing=True,
        )
        return config
    specs = None
    if case.packs_offline:
        specs = PackedSequenceSpecs(
            packed_sequence_size=SEQUENCE, pad_seq_to_mult=case.aligns_to, pad_cu_seqlens=case.aligns_to > 1
        )
    config.dataset = GPTSFTDatasetConfig(
        seq_length=SEQUENCE,
        dataset_root=folder / "texts",
        preprocessing=texts,
        do_test=False,
        enable_offline_packing=case.packs_offline,
        offline_packing_specs=specs,
        dataset_kwargs={"pad_to_max_length": True},
    )
    return config


def _for_two_cpu_ranks(config: Any, has_own_attention: bool) -> None:
    from megatron.core.transformer.enums import AttnBackend

    _fit(config.model)
    config.model.seq_length = SEQUENCE
    if has_own_attention:
        config.model.attention_backend = AttnBackend.local  # Transformer Engine's does not run on a CPU
    config.model.cross_entropy_loss_fusion = False  # it rounds gradients to bf16
    config.mixed_precision = None
    config.optimizer.bf16 = config.optimizer.fp16 = False
    config.optimizer.params_dtype = torch.float32
    # Not Adam, whose step for a gradient of rounding errors alone is as long as for any other.
    config.optimizer.optimizer = "sgd"
    # Megatron's distributed optimizer knows no other.
    config.optimizer.use_distributed_optimizer = config.ddp.use_distributed_optimizer = False
    config.optimizer.use_precision_aware_optimizer = False
    config.ddp.overlap_param_gather = False
    config.optimizer.lr = 0.1
    config.scheduler.lr_warmup_iters = 1
    config.dist.distributed_backend = "gloo"
    config.dataset.num_workers = 0
    config.dataset.pin_memory = config.dataset.persistent_workers = False
    config.train.train_iters = STEPS
    size = 2 if getattr(config.dataset, "enable_in_batch_packing", False) else 1
    config.train.micro_batch_size = size
    config.train.global_batch_size = MICROBATCHES * size
    config.validation.eval_iters = 2
    config.validation.eval_interval = STEPS
    config.logger.tensorboard_dir = None
    config.checkpoint.save = config.checkpoint.load = None


def _fit(provider: Any) -> None:
    """Sizes, types and kernels of the model that Megatron-Bridge's `provider` builds."""
    provider.pipeline_model_parallel_size = 2
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.fp16 = provider.bf16 = False
    provider.gradient_accumulation_fusion = provider.masked_softmax_fusion = provider.apply_rope_fusion = False


def go_in_and_come_back(folder: Path) -> int:
    """The logits of a Llama, by segments of Megatron's model, are those of transformers; and the number of weights that
    come back as they went in."""
    from megatron.bridge import AutoBridge
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0:
        save_llama(folder, VOCABULARY)
    dist.barrier()
    bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=torch.float32)
    model = _model(bridge)
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batches = list(torch.randint(VOCABULARY, (2, 2, SEQUENCE), generator=torch.Generator().manual_seed(1)))
    with installed(segment_tokens=16):
        logits = _logits(model, batches)
    if logits:
        with torch.no_grad():
            expected = [llama(tokens).logits for tokens in batches]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    back = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    for name, weight in llama.state_dict().items():
        torch.testing.assert_close(back[name], weight, atol=0, rtol=0)
    return len(back)


def _logits(model: list[torch.nn.Module], batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """[b, s, vocabulary] of each micro-batch, on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found: list[torch.Tensor] = []

    def forward_step(data_iterator: Iterator, chunk: torch.nn.Module) -> tuple:
        tokens = next(data_iterator)
        output = chunk(tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1), None)

        def loss_of(logits: torch.Tensor) -> tuple:
            found.append(logits.detach().clone())
            return logits.sum(), {}

        return output, loss_of

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=SEQUENCE,
        micro_batch_size=len(batches[0]),
        forward_only=True,
    )
    return found


def _save_checkpoint(folder: Path) -> None:
    """Of the Llama in `folder`, as `AutoBridge.import_ckpt` saves it, but on two stages."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.initialize import destroy_global_state

    bridge = AutoBridge.from_hf_pretrained(folder / "llama", torch_dtype=torch.float32)
    bridge.save_megatron_model(_model(bridge), folder / "checkpoint")
    destroy_global_state()


def _model(bridge: Any) -> list[torch.nn.Module]:
    provider = bridge.to_megatron_provider()
    _fit(provider)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    return provider.provide_distributed_model(wrap_with_ddp=False)


def _with_old_metadata(forward_step: Callable) -> Callable:
    """Packs as Megatron-Bridge wrote them before 0.6: `cu_seqlens` that end with -1, and where."""

    def of_pack(batch: dict) -> dict:
        boundaries = batch.pop("cu_seqlens_q").squeeze()
        ends = torch.unique(boundaries)  # the batches of the loader repeat the last one
        length = batch.pop("max_seqlen_q")
        for name in ("cu_seqlens_kv", "max_seqlen_kv"):
            del batch[name]
        return {
            **batch,
            "cu_seqlens": torch.cat([ends, ends.new_full([3], -1)])[None],
            "cu_seqlens_argmin": torch.tensor(len(ends)),
            "max_seqlen": length,
        }

    def step(state: Any, data_iterator: Iterator, model: Any, return_schedule_plan: bool = False) -> tuple:
        return forward_step(state, data_iterator and map(of_pack, data_iterator), model, return_schedule_plan)

    return step


def save_examples(folder: Path) -> None:
    """Texts for fine-tuning, as lines of JSON."""
    folder.mkdir()
    draw = random.Random(0)
    for name, copies in (("training", 6), ("validation", 2)):
        lines = []
        for length in LENGTHS * copies:
            numbers = [str(draw.randrange(4, VOCABULARY)) for _ in range(length)]
            prompt = length // 3
            lines.append(json.dumps({"input": " ".join(numbers[:prompt]), "output": " ".join(numbers[prompt:])}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
