"""Steps of verl's training workers in Ray: the variable SEQ1F1B reaches them as verl starts them.

    VERL_USE_EXTERNAL_MODULES=frameworks.verl_on_cpu VERL_PLATFORM=cpu python -m frameworks.verl_workers FOLDER

A program of its own, as a trainer is: it starts Ray, has verl's `RayWorkerGroup` start two workers, each with the
Megatron engine, and sends them batches. Prints the losses, gradient norms and log-probabilities as a line of JSON.
"""

import json
import sys
from pathlib import Path

import ray
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from frameworks import verl_on_cpu
from frameworks.live_bytes import LiveBytes
from frameworks.models import save_qwen
from frameworks.verl_engine import STEPS, VOCABULARY, Case, batch, configs_of, loss_of

CASE = Case("token-mean")


class Worker(TrainingWorker):
    """verl's, with what a CPU needs, and with a count of the bytes of the steps that follow `watch`."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        verl_on_cpu.prepare()
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watch(self) -> None:
        self._memory = LiveBytes()
        self._memory.__enter__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def peak_bytes(self) -> int:
        self._memory.__exit__(None, None, None)
        return self._memory.peak


def main(folder: Path) -> None:
    save_qwen(folder, VOCABULARY)
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    model, engine, optimizer, checkpoint = configs_of(folder, CASE)
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=checkpoint,
    )
    workers = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=2),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Worker), config=config),
    )
    workers.reset()
    workers.set_loss_fn(loss_of(CASE.loss))
    losses = []
    norms = []
    for step in range(STEPS):
        data = batch(CASE.loss, step, dynamic=True)
        tu.assign_non_tensor(data, update_lr_scheduler=True)
        if step == STEPS - 1:
            workers.watch()
        metrics = tu.get(workers.train_batch(data).get(), "metrics")
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    peaks = workers.peak_bytes()
    data = batch(CASE.loss, STEPS, dynamic=True)
    tu.assign_non_tensor(data, compute_loss=False)
    inferred = workers.infer_batch(data).get()
    # What follows the last token of a sequence depends on how packs are aligned; no loss reads it.
    log_probs = torch.cat([each[:-1] for each in inferred["log_probs"].unbind()])
    ray.shutdown()
    print(json.dumps({"losses": losses, "norms": norms, "peaks": peaks, "log_probs": log_probs.tolist()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
