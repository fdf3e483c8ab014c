"""Tensors that upstream creates on a GPU, made on the CPU."""

import functools

import torch


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or str(device).startswith("cuda")


def made_on_cpu(factory):
    """``factory`` (``torch.zeros``, say), with a CUDA ``device`` read as the CPU, and nothing pinned for it."""

    @functools.wraps(factory)
    def create(*args, **kwargs):
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if kwargs.get("out") is not None:  # which is where it is: without values in a rehearsal
            kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def stay(tensor, *args, **kwargs):
    """``Tensor.cuda``: the tensor is where it belongs."""
    return tensor


def cuda_type_name(type_method):
    """``Tensor.type``, that names a CPU tensor as upstream's checks expect it."""

    @functools.wraps(type_method)
    def name_or_cast(tensor, dtype=None, *args, **kwargs):
        if dtype is None:
            return type_method(tensor).replace("torch.", "torch.cuda.", 1)
        return type_method(tensor, dtype, *args, **kwargs)

    return name_or_cast
