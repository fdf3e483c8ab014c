"""What the processes of verl's PPO trainer import on a CPU: VERL_USE_EXTERNAL_MODULES=frameworks.verl_ppo_on_cpu.

Beside verl_trainer_on_cpu.py: a rollout engine called `fixed`, registered as vLLM's and SGLang's are, in place of an
inference server, which wants a GPU. It answers a prompt with tokens that depend on the prompt and on how often it was
asked, takes new weights as a rollout engine does, and forgets them.
"""

import random
from typing import Any

import ray
from verl.plugin.platform.platform_base import PlatformBase
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from frameworks import verl_trainer_on_cpu  # noqa: F401
from frameworks.policies import VOCABULARY
from frameworks.verl_on_cpu import Cpu

FIRST_WORD = 4  # tokens below it are special
# Tokens of responses, one behind the other: a few long ones among short ones.
LENGTHS = (90, 20, 7, 60, 33, 5, 71, 16)


class FixedServer:
    """Stands for an inference server."""

    def __init__(self) -> None:
        self._asked: dict[tuple[int, ...], int] = {}

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> TokenOutput:
        prompt = tuple(prompt_ids)
        number = self._asked.get(prompt, 0)
        self._asked[prompt] = number + 1
        draw = random.Random(str((prompt, number)))
        length = LENGTHS[(sum(prompt) + number) % len(LENGTHS)]
        tokens = [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-4.0] * length,
            stop_reason="completed",
            extra_fields={"global_steps": 0},  # of the weights, which it does not have
        )

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...


class FixedReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        # One for all replicas: which of them is asked depends on their load, and an answer on how often a server was.
        server = ray.remote(num_cpus=0)(FixedServer).options(name="fixed-server", get_if_exists=True).remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"fixed-{self.replica_rank}"


class FixedRollout(base.BaseRollout):
    """In a worker, beside its actor, whose weights it is given after a step."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        for _name, _weight in weights:  # which all ranks of a pipeline send each other
            pass


# verl counts GPUs or these; Ray takes any number of these, but no GPUs that are not there.
Cpu.ray_resource_name = lambda platform: "NPU"
Cpu.ray_resource_options = PlatformBase.ray_resource_options
RolloutReplicaRegistry.register("fixed", lambda: FixedReplica)
base._ROLLOUT_REGISTRY["fixed", "async"] = f"{__name__}.{FixedRollout.__name__}"
