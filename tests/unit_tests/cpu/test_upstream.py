"""What of Megatron's arguments a CPU cannot have."""

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron.seq1f1b.cpu import upstream


def parse(monkeypatch, *flags: str, **asked) -> Namespace:
    """The arguments of a script that parses twice, as Megatron's own does."""
    defaults = {name: value for name, value, _ in upstream.FLAGS} | {"transformer_impl": "transformer_engine"}
    monkeypatch.setattr(sys, "argv", ["script", *flags])
    given = defaults | {"profile": False} | asked
    parsed = [upstream.parse_with_cpu_defaults(lambda: Namespace(**given)) for _ in range(2)]
    return parsed[1]


def test_defaults_for_a_gpu_are_replaced(monkeypatch, caplog):
    assert parse(monkeypatch).transformer_impl == "local"
    parse(monkeypatch, "--distributed-backend", "nccl", distributed_backend="nccl")
    assert caplog.text.count("--distributed-backend nccl becomes gloo on the CPU") == 1


def test_transformer_engine_is_refused_where_it_is_asked_for(monkeypatch):
    """A rehearsal takes it: the cluster has a GPU."""
    with pytest.raises(
        ValueError, match="^--transformer-impl transformer_engine needs a GPU: .*; use --transformer-impl"
    ):
        parse(monkeypatch, "--transformer-impl", "transformer_engine")
    assert parse(monkeypatch, "--transformer-impl=transformer_engine", dry_run=True).transformer_impl == "local"


@pytest.mark.parametrize("given", [None, hybrid_stack_spec, ModuleSpec(module=object)], ids=["none", "default", "own"])
def test_local_layers_stand_for_transformer_engines_only(given):
    transformer = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    model = SimpleNamespace(_model_config=SimpleNamespace(hybrid_stack_spec=given, transformer=transformer))
    found = upstream.build_from_local_layers(lambda self: self._model_config.hybrid_stack_spec, model)
    if given in (None, hybrid_stack_spec):
        assert found.module.__name__ == "LocalHybridStack"
    else:
        assert found is given
