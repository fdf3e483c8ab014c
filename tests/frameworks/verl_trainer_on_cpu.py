"""What the processes of verl's trainers import on a CPU: VERL_USE_EXTERNAL_MODULES=frameworks.verl_trainer_on_cpu.

Beside verl_on_cpu.py: weights and gradients are of fp32, which verl's configurations do not name, and `trainer.device`
stays what the command line says.
"""

from typing import Any

import torch
from verl.utils import device
from verl.workers.config import McoreEngineConfig

from frameworks import verl_on_cpu

verl_on_cpu.prepare()
_check = McoreEngineConfig.__post_init__


def _checked(config: Any) -> None:
    _check(config)
    object.__setattr__(config, "dtype", "float32")


McoreEngineConfig.__post_init__ = _checked
device.auto_set_device = lambda config: None
torch.cuda.get_device_name = lambda device=None: "CPU"  # whose FLOPS verl looks up
