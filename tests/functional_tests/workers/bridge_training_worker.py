"""Megatron-Bridge's own loop trains a Llama of Hugging Face's on two pipeline stages, on a CPU.

Started on two ranks with a folder to work in and a number of segments. With 1 Megatron's own 1F1B runs, in which this
package has no part. Otherwise the trained model is written to the folder as one of Hugging Face's, whose logits are
those of Megatron's.
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

import megatron.bridge.training.setup  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from megatron.bridge.recipes.common import _pretrain_common  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.config import ConfigContainer  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402

from support.bridge_llama import BATCH, SEQUENCE, VOCABULARY, check_logits, for_two_cpu_ranks, save_llama  # noqa: E402

# Asserts CUDA otherwise.
setup = megatron.bridge.training.setup
setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)


class Export(Callback):
    """Writes the trained model, and compares it with what was written."""

    def __init__(self, bridge: AutoBridge) -> None:
        self._bridge = bridge

    def on_train_end(self, context) -> None:
        self._bridge.save_hf_pretrained(context.model, FOLDER / "trained", show_progress=False)
        check_logits(context.model, FOLDER / "trained")


def config(bridge: AutoBridge) -> ConfigContainer:
    """Five iterations of four micro-batches of random tokens, and evaluations between them."""
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
    return config


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_llama(FOLDER / "llama")
    dist.barrier()
    bridge = AutoBridge.from_hf_pretrained(FOLDER / "llama", torch_dtype=torch.float32)
    pretrain(config(bridge), forward_step, callbacks=[Export(bridge)] if SEGMENTS > 1 else None)


if __name__ == "__main__":
    main()
