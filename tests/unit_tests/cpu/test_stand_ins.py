"""What stands in for functions of torch and Megatron on a CPU."""

import sys
from argparse import Namespace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron.seq1f1b.cpu import stand_ins


def test_groups_of_gloo_share_one_device(monkeypatch):
    """A device is a thread that polls; torch makes one for each group that is not given any."""
    made, make = [], dist.ProcessGroupGloo.create_default_device
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_default_device", lambda: made.append(make()) or made[-1])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    stand_ins._devices_of.cache_clear()
    kind, store = stand_ins.on_one_device(dist.ProcessGroupGloo), dist.HashStore()
    groups = [kind(dist.PrefixStore(str(i), store), 0, 1, timedelta(minutes=1)) for i in range(10)]
    assert len(made) == 1
    for group in groups:
        ones = torch.ones(2)
        group.allreduce([ones]).wait()
        assert ones.tolist() == [1, 1]
        assert group.options._devices == made
        assert group.options._threads == 1  # two of torch's corrupt the heap
    stand_ins._devices_of.cache_clear()


def parse(monkeypatch, *flags: str, **asked) -> Namespace:
    """The arguments of a script that parses twice, as Megatron's own does."""
    defaults = {name: value for name, value, _ in stand_ins.FLAGS} | {"transformer_impl": "transformer_engine"}
    monkeypatch.setattr(sys, "argv", ["script", *flags])
    given = defaults | {"profile": False} | asked
    parsed = [stand_ins.parse_with_cpu_defaults(lambda: Namespace(**given)) for _ in range(2)]
    return parsed[1]


def test_what_needs_a_gpu_is_replaced_or_refused(monkeypatch, caplog):
    assert parse(monkeypatch).transformer_impl == "local"
    parse(monkeypatch, "--distributed-backend", "nccl", distributed_backend="nccl")
    assert caplog.text.count("--distributed-backend nccl becomes gloo on the CPU") == 1
    needs = "^--transformer-impl transformer_engine needs a GPU: .*; use --transformer-impl"
    with pytest.raises(ValueError, match=needs):  # but in a rehearsal, whose cluster has one
        parse(monkeypatch, "--transformer-impl", "transformer_engine")
    assert parse(monkeypatch, "--transformer-impl=transformer_engine", dry_run=True).transformer_impl == "local"


@pytest.mark.parametrize("given", [None, hybrid_stack_spec, ModuleSpec(module=object)], ids=["none", "default", "own"])
def test_local_layers_stand_for_transformer_engines_only(given):
    transformer = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    model = SimpleNamespace(_model_config=SimpleNamespace(hybrid_stack_spec=given, transformer=transformer))
    found = stand_ins.build_from_local_layers(lambda self: self._model_config.hybrid_stack_spec, model)
    if given in (None, hybrid_stack_spec):
        assert found.module.__name__ == "LocalHybridStack"
    else:
        assert found is given
