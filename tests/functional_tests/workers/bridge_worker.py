"""A Llama of Hugging Face's, made here, goes through Megatron-Bridge onto two pipeline stages and back, on a CPU.

Started on two ranks with a folder to work in. The logits of Megatron's model, computed by segments, are those of the
Llama; the weights that come back are those that went in.
"""

import sys
from pathlib import Path

import megatron.seq1f1b
from megatron.seq1f1b import cpu
from support import te_double

te_double.load()  # Megatron-Bridge imports Transformer Engine
cpu.activate()
megatron.seq1f1b.install(sequence_splits=3)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from support.bridge_llama import check_logits, for_two_cpu_ranks, save_llama  # noqa: E402


def to_megatron(bridge: AutoBridge) -> list[torch.nn.Module]:
    provider = bridge.to_megatron_provider()
    for_two_cpu_ranks(provider)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    return provider.provide_distributed_model(wrap_with_ddp=False)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_llama(folder / "llama")
    dist.barrier()
    bridge = AutoBridge.from_hf_pretrained(folder / "llama", torch_dtype=torch.float32)
    model = to_megatron(bridge)
    check_logits(model, folder / "llama")

    llama = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    back = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    for name, weight in llama.state_dict().items():
        torch.testing.assert_close(back[name], weight, atol=0, rtol=0)
    print(f"rank {dist.get_rank()}: {len(back)} weights came back", flush=True)


if __name__ == "__main__":
    main()
