"""The distributed optimizer over torch's Adam, which upstream runs where Apex is missing.

Both redirects serve checkpoints: without them none can be loaded, and the first steps after it
would count time once for every parameter.
"""

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


def load_with_own_steps(load_state_dict):
    """``DistributedOptimizer.load_state_dict``, that gives each parameter its own step counter.

    Upstream hands the same tensor to all of them, and Adam increments it in place.
    """

    @functools.wraps(load_state_dict)
    def load(self, loaded):
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load
