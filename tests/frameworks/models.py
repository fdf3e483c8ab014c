"""Tiny models in Hugging Face's format, with a tokenizer of numbers."""

from pathlib import Path

import torch
import torch.distributed as dist


def save_qwen(
    folder: Path,
    vocabulary: int,
    num_layers: int = 4,
    hidden_size: int = 32,
    most_tokens: int = 512,
    num_experts: int = 1,
    has_scores: bool = False,
) -> None:
    """A Qwen3 for sequences of `most_tokens`; of several experts two take each token. If it `has_scores`, a head that
    gives one for each token, as a reward model has it, is saved beside that of the logits."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        vocab_size=vocabulary,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        initializer_range=0.2,
        tie_word_embeddings=False,
        max_position_embeddings=most_tokens,
    )
    if num_experts == 1:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        experts = Qwen3MoeConfig(
            **sizes,
            num_experts=num_experts,
            num_experts_per_tok=2,
            moe_intermediate_size=hidden_size,
            norm_topk_prob=True,
        )
        model = Qwen3MoeForCausalLM(experts)
    if has_scores:
        model.score = torch.nn.Linear(hidden_size, 1, bias=False)
    model.save_pretrained(folder)
    save_tokenizer(folder, vocabulary)


def save_dense_and_experts(folder: Path, vocabulary: int) -> None:
    """A Qwen3 in `dense`, and one of four experts in `experts`, saved by rank 0; all ranks wait for it."""
    if dist.get_rank() == 0:
        save_qwen(folder / "dense", vocabulary)
        save_qwen(folder / "experts", vocabulary, num_experts=4)
    dist.barrier()


def save_llama(folder: Path, vocabulary: int) -> None:
    """A Llama of four layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        vocab_size=vocabulary,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, vocabulary)


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word is a number, and its token, too; the first few are special."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", bos_token="1", eos_token="2", pad_token="3"
    )
    tokenizer.save_pretrained(folder)
