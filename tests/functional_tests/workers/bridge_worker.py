"""A Llama of Hugging Face's, made here, in Megatron-Bridge on two pipeline stages, on a CPU.

Started on two ranks with a folder to work in, a number of segments, and `train` if Megatron-Bridge's own loop is to
train it. With 1 segment Megatron's own 1F1B runs, in which this package has no part. Logits of Megatron's model, by
segments, are those of the Llama that it was made from, or that was written to the folder after the training; without
training the weights that come back are those that went in.
"""

import sys
from functools import partial
from pathlib import Path

import megatron.seq1f1b
from megatron.seq1f1b import cpu
from support import te_double

FOLDER, SEGMENTS = Path(sys.argv[1]), int(sys.argv[2])
te_double.load()  # Megatron-Bridge imports Transformer Engine
cpu.activate()
if SEGMENTS > 1:
    megatron.seq1f1b.install(sequence_splits=SEGMENTS)
else:
    import megatron.core.datasets.utils

    # It calls make, for which the wheel of megatron-core has no makefile.
    megatron.core.datasets.utils.compile_helpers = lambda: None

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

SEQUENCE, BATCH, MICROBATCHES, VOCABULARY = 48, 2, 2, 128


def save_llama(folder: Path) -> None:
    """With a tokenizer, since Megatron-Bridge writes one beside the weights."""
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
    batches = list(
        torch.randint(VOCABULARY, (MICROBATCHES, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    )
    logits = _logits_by_segments(model, batches)
    if parallel_state.is_pipeline_last_stage():
        llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = torch.stack([llama(tokens).logits for tokens in batches])
        difference = (logits - expected).abs().max().item()
        print(f"logits up to {expected.abs().max():.2f} differ by at most {difference:.1e}", flush=True)
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

    get_forward_backward_func()(
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


def train(bridge: AutoBridge) -> None:
    """Five iterations of four micro-batches of random tokens, and evaluations between them."""
    import megatron.bridge.training.setup as setup
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    class Export(Callback):
        """Writes the trained model, and compares it with what was written."""

        def on_train_end(self, context) -> None:
            bridge.save_hf_pretrained(context.model, FOLDER / "trained", show_progress=False)
            check_logits(context.model, FOLDER / "trained")

    # Asserts CUDA otherwise.
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    config = _pretrain_common()
    config.model = bridge.to_megatron_provider()
    for_two_cpu_ranks(config.model)
    config.model.seq_length = config.dataset.seq_length = SEQUENCE
    if SEGMENTS == 1:
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
    pretrain(config, forward_step, callbacks=[Export()] if SEGMENTS > 1 else None)


def go_in_and_come_back(bridge: AutoBridge) -> None:
    provider = bridge.to_megatron_provider()
    for_two_cpu_ranks(provider)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    check_logits(model, FOLDER / "llama")

    llama = AutoModelForCausalLM.from_pretrained(FOLDER / "llama", dtype=torch.float32)
    back = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    for name, weight in llama.state_dict().items():
        torch.testing.assert_close(back[name], weight, atol=0, rtol=0)
    print(f"rank {dist.get_rank()}: {len(back)} weights came back", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_llama(FOLDER / "llama")
    dist.barrier()
    made = AutoBridge.from_hf_pretrained(FOLDER / "llama", torch_dtype=torch.float32)
    (train if "train" in sys.argv else go_in_and_come_back)(made)
