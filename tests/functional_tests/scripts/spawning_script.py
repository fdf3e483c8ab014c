"""pretrain_gpt.py, which starts the process for checkpoints as on a GPU: in a new Python, which imports this script."""

from functools import partial

import pretrain_gpt

# isort: split
# Megatron after what moves it to the CPU.
from megatron.core.dist_checkpointing.strategies import filesystem_async

filesystem_async.get_write_results_queue = partial(filesystem_async.get_write_results_queue, mp_mode="spawn")
if __name__ == "__main__":
    pretrain_gpt.main(pretrain_gpt.gpt_config_from_args, {})
