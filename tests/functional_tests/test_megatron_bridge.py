"""Models of Hugging Face's in Megatron-Bridge: a Llama, made here, runs and trains by segments on two pipeline stages.

Logits of Megatron's model are those of the Llama that it was made from, or that was written after the training.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.transformer.enums import AttnBackend

import megatron.seq1f1b
from support.launch import ROOT, Launcher

# Made by hand, see docs/hugging-face.md; its transformers is not the one of the other tests.
BRIDGE = ROOT / ".venv" / "megatron-bridge"
# Made by scripts/setup.sh; what Megatron-Bridge imports.
TRANSFORMER_ENGINE = ROOT / ".venv" / "transformer-engine"
SEQUENCE, BATCH, MICROBATCHES, VOCABULARY = 48, 2, 2, 128


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Ranks that find Megatron-Bridge."""
    for package in (BRIDGE / "megatron" / "bridge", BRIDGE / "modelopt", TRANSFORMER_ENGINE / "transformer_engine"):
        if not package.is_dir():
            pytest.skip(f"{package.relative_to(ROOT)} is not there: see docs/hugging-face.md")
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("HF_HUB_OFFLINE", "1")
        launcher = Launcher(tmp_path_factory.mktemp("logs"), [BRIDGE, TRANSFORMER_ENGINE])
    yield launcher
    launcher.close()


def bridge_to_a_llama(folder: Path, segments: int) -> Any:
    """With 1 segment Megatron's own 1F1B runs, in which this package has no part. Imports Megatron-Bridge after what it
    takes by name has been replaced."""
    if segments > 1:
        megatron.seq1f1b.install(sequence_splits=segments)
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import initialize

    if segments == 1:  # it calls make, for which the wheel of megatron-core has no makefile
        initialize.compile_helpers = lambda: None
    if dist.get_rank() == 0:
        save_llama(folder / "llama")
    dist.barrier()
    return AutoBridge.from_hf_pretrained(folder / "llama", torch_dtype=torch.float32)


def save_llama(folder: Path) -> None:
    """With a tokenizer, since Megatron-Bridge writes one beside the weights."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, initializer_range=0.2)).save_pretrained(folder)
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def for_two_cpu_ranks(provider) -> None:
    """Sizes, types and kernels of the model that Megatron-Bridge's `provider` builds."""
    provider.pipeline_model_parallel_size = 2
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.fp16 = provider.bf16 = False
    provider.gradient_accumulation_fusion = provider.masked_softmax_fusion = provider.apply_rope_fusion = False


def check_logits(model: list[torch.nn.Module], folder: Path) -> None:
    """Those of Megatron's model, by segments, are those of the Llama in `folder`; computed on the last stage."""
    from transformers import AutoModelForCausalLM

    batches = list(
        torch.randint(VOCABULARY, (MICROBATCHES, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    )
    logits = _logits_by_segments(model, batches)
    if parallel_state.is_pipeline_last_stage():
        llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = torch.stack([llama(tokens).logits for tokens in batches])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def _logits_by_segments(model: list[torch.nn.Module], batches: list[torch.Tensor]) -> torch.Tensor:
    """[micro-batch, b, s, vocabulary] on the last stage."""
    segments = []

    def forward_step(data_iterator, chunk):
        tokens = next(data_iterator)["tokens"]
        positions = torch.arange(tokens.shape[1]).expand(BATCH, -1)
        output = chunk(tokens, positions, None)

        def loss_func(logits):
            segments.append(logits.detach().clone())
            return logits.sum(), torch.tensor(tokens.numel(), dtype=torch.int), {}

        return output, loss_func

    pipeline_parallel.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([{"tokens": tokens} for tokens in batches]),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=True,
    )
    if not segments:
        return torch.empty(0)
    assert len(segments) > MICROBATCHES, "these are whole sequences"
    return torch.cat(segments, dim=1).view(BATCH, MICROBATCHES, SEQUENCE, -1).transpose(0, 1)


def go_in_and_come_back(folder: Path) -> int:
    """The number of weights that came back as they went in."""
    from transformers import AutoModelForCausalLM

    bridge = bridge_to_a_llama(folder, segments=3)
    provider = bridge.to_megatron_provider()
    for_two_cpu_ranks(provider)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    check_logits(model, folder / "llama")

    llama = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    back = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    for name, weight in llama.state_dict().items():
        torch.testing.assert_close(back[name], weight, atol=0, rtol=0)
    return len(back)


def train(folder: Path, segments: int) -> None:
    """Five iterations of four micro-batches of random tokens, and evaluations between them."""
    bridge = bridge_to_a_llama(folder, segments)
    import megatron.bridge.training.setup as setup
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    class Export(Callback):
        """Writes the trained model, and compares it with what was written."""

        def on_train_end(self, context) -> None:
            bridge.save_hf_pretrained(context.model, folder / "trained", show_progress=False)
            check_logits(context.model, folder / "trained")

    # Asserts CUDA otherwise.
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    config = _pretrain_common()
    config.model = bridge.to_megatron_provider()
    for_two_cpu_ranks(config.model)
    config.model.seq_length = config.dataset.seq_length = SEQUENCE
    if segments == 1:
        config.model.attention_backend = AttnBackend.local  # Transformer Engine's does not run on a CPU
    config.model.cross_entropy_loss_fusion = False  # it rounds gradients to bf16
    config.mixed_precision = None
    config.optimizer.bf16 = config.optimizer.fp16 = False
    config.optimizer.params_dtype = torch.float32
    config.dist.distributed_backend = "gloo"
    config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model = "NullTokenizer", None
    config.tokenizer.vocab_size = VOCABULARY - 1
    config.tokenizer.use_tokenizer_vocab_size = False
    config.dataset.num_workers = 0
    config.dataset.pin_memory = config.dataset.persistent_workers = False
    config.train.train_iters = 5
    config.train.global_batch_size, config.train.micro_batch_size = 4 * BATCH, BATCH
    config.validation.eval_iters = config.validation.eval_interval = 2
    config.scheduler.lr_warmup_iters = 1
    config.optimizer.lr = 1e-3
    config.logger.log_interval = 1
    config.logger.tensorboard_dir = None
    config.checkpoint.save = config.checkpoint.load = None
    pretrain(config, forward_step, callbacks=[Export()] if segments > 1 else None)


def test_a_llama_goes_in_and_comes_back(launch, tmp_path):
    assert launch.call(2, go_in_and_come_back, timeout=300, folder=tmp_path) == [39, 39]


def test_its_own_loop_trains_by_segments_and_saves_the_model(launch, tmp_path):
    jobs = []
    for segments in (4, 1):
        launch.call(2, train, timeout=300, folder=tmp_path, segments=segments)
        jobs.append(launch.last)
    ours, own = jobs
    assert len(own.losses()) == 5 and own.losses()[-1] < own.losses()[0] - 0.5
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)
    evaluated = own.losses("lm loss value")
    assert len(evaluated) >= 3  # after two iterations, after four, and at the end
    assert ours.losses("lm loss value") == pytest.approx(evaluated, abs=1e-5)
