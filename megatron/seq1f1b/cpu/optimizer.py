"""Checkpoints of the distributed optimizer over torch's Adam, which upstream runs without Apex."""

import functools

import torch


def state_dict_before_first_step(state_dict):
    """``DistributedOptimizer.state_dict``, which also works before the first step.

    It reads the number of steps from the state of each parameter, which does not exist yet when a
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
    """``DistributedOptimizer.load_state_dict``, which also restores the number of steps.

    A checkpoint stores it once a group. Upstream gives all parameters one tensor of it, which Adam
    increments in place, once for each of them. Parameters in fp32, which are their own main copies,
    are written to, which only ``no_grad`` allows.
    """

    @functools.wraps(load_state_dict)
    @torch.no_grad()
    def load(self, loaded):
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load


def set_all_but_steps(set_states):
    """``DistributedOptimizer._set_main_param_and_optimizer_states``, for tensors without steps.

    It copies into every tensor of a parameter's state, the number of steps too, which is not among
    the tensors that a checkpoint stores for each parameter.
    """

    @functools.wraps(set_states)
    def set_tensors(self, model_param, tensors):
        set_states(self, model_param, {**tensors, "step": None})

    return set_tensors
