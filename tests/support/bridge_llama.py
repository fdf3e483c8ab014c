"""A tiny Llama of Hugging Face's, and the logits of a model of Megatron's by segments, for Megatron-Bridge's workers.

To be imported after `install`, since it imports Megatron.
"""

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
