"""Checkpoints of the distributed optimizer over torch's Adam, which upstream runs without Apex."""

import functools

import torch


def state_dict_before_first_step(state_dict):
    """``DistributedOptimizer.state_dict``, that answers before the first step too.

    It asks the state of each parameter for the number of steps, and there is none yet when a
    checkpoint is about to be loaded.
    """

    @functools.wraps(state_dict)
    def answer(self):
        inner = self.optimizer
        parameters = [p for group in inner.param_groups for p in group["params"]]
        if inner.state or not parameters:
            return state_dict(self)
        inner.state[parameters[0]] = {"step": torch.tensor(0.0)}
        try:
            return state_dict(self)
        finally:
            inner.state.clear()

    return answer


def load_with_steps(load_state_dict):
    """``DistributedOptimizer.load_state_dict``, that restores the number of steps.

    A checkpoint stores it once a group. Upstream gives all parameters one tensor of it, which Adam
    increments in place, once for each of them; and then overwrites it. Parameters in fp32, which
    are their own main copies, are written to, which only ``no_grad`` allows.
    """

    @functools.wraps(load_state_dict)
    @torch.no_grad()
    def load(self, loaded):
        load_state_dict(self, loaded)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    return load
