"""A Llama of Hugging Face's, made here, goes through Megatron-Bridge onto two pipeline stages and back, on a CPU.

Started on two ranks with a folder to work in. The logits of Megatron's model, computed by segments, are those of the
Llama; the weights that come back are those that went in.
"""

import sys
from pathlib import Path

import megatron.seq1f1b
from megatron.seq1f1b import cpu

cpu.activate(with_transformer_engine=True)  # which Megatron-Bridge imports
megatron.seq1f1b.install(sequence_splits=3)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

SEQUENCE, BATCH, MICROBATCHES = 48, 2, 2


def save_llama(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, initializer_range=0.2)).save_pretrained(folder)


def to_megatron(bridge: AutoBridge) -> list[torch.nn.Module]:
    provider = bridge.to_megatron_provider()
    provider.pipeline_model_parallel_size = 2
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.fp16 = provider.bf16 = False
    provider.gradient_accumulation_fusion = provider.masked_softmax_fusion = provider.apply_rope_fusion = False
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    return provider.provide_distributed_model(wrap_with_ddp=False)


def logits_by_segments(model: list[torch.nn.Module], batches: list[torch.Tensor]) -> torch.Tensor:
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
    assert len(segments) == 3 * MICROBATCHES
    return torch.cat(segments, dim=1).view(BATCH, MICROBATCHES, SEQUENCE, -1).transpose(0, 1)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_llama(folder / "llama")
    dist.barrier()
    bridge = AutoBridge.from_hf_pretrained(folder / "llama", torch_dtype=torch.float32)
    model = to_megatron(bridge)

    batches = list(torch.randint(128, (MICROBATCHES, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1)))
    logits = logits_by_segments(model, batches)
    llama = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    if parallel_state.is_pipeline_last_stage():
        with torch.no_grad():
            expected = torch.stack([llama(tokens).logits for tokens in batches])
        difference = (logits - expected).abs().max().item()
        print(f"logits up to {expected.abs().max():.2f} differ by at most {difference:.1e}", flush=True)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    # What save_hf_pretrained writes, which needs nvidia-modelopt.
    back = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    for name, weight in llama.state_dict().items():
        torch.testing.assert_close(back[name], weight, atol=0, rtol=0)
    print(f"rank {dist.get_rank()}: {len(back)} weights came back", flush=True)


if __name__ == "__main__":
    main()
