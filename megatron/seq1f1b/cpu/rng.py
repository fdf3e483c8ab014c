"""The random state of "the GPU" is the CPU's own."""

import contextlib
import functools

import torch


def get_state(*args, **kwargs):
    return torch.get_rng_state()


def set_state(new_state, *args, **kwargs):
    torch.set_rng_state(new_state)


def seed(value):
    torch.default_generator.manual_seed(value)


def loader_with_own_generator(build_data_loader):
    """A data loader whose workers' seed leaves alone the generator that dropout draws from.

    It is drawn when the loader starts: before the first step, but after a checkpoint is loaded.
    """

    @functools.wraps(build_data_loader)
    def build(*args, **kwargs):
        loader = build_data_loader(*args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader):
            loader.generator = torch.Generator()
        return loader

    return build


@contextlib.contextmanager
def fork(tracker, name="model-parallel-rng"):
    """``CudaRNGStatesTracker.fork``: run a block with the random state ``name`` of ``tracker``.

    Upstream's own warns each time that a fork draws from the CPU's generator, which here it must.
    """
    if name not in tracker.states_:
        raise KeyError(f"random state {name} was never added to the tracker")
    outer_name, outer_state = tracker._current_state_name, torch.get_rng_state()
    if outer_name in tracker.states_:
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        # A nested fork of the outer name has moved that state on.
        torch.set_rng_state(tracker.states_.get(outer_name, outer_state))
        tracker._current_state_name = outer_name
