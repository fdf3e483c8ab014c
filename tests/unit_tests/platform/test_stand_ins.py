"""What stands in for functions of torch and Megatron on a CPU, and in a rehearsal."""

import inspect
import re
import sys
from argparse import Namespace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron.seq1f1b.platform import recurrent, redirects, stand_ins, without_te
from megatron.seq1f1b.process.patches import owner_of
from megatron.seq1f1b.rehearsal import fakes

LAUNCH = Namespace(device="cuda", replaced_on_cpu={"apply_rope_fusion": True, "transformer_impl": "transformer_engine"})
PATCHES = (
    *redirects.REDIRECTS,
    *(*without_te.LOCAL_LAYERS, *without_te.RECOMPUTATION, *without_te.OUTPUT_LAYER, *without_te.TORCH_ADAM),
    *fakes.patches(LAUNCH, lambda *args, **kwargs: None),
)
# Not of these packages, which are not installed: their kernels, and flags that mark them as installed.
OF_PACKAGES = {
    f"megatron.core.ssm.{name}" for name, new in recurrent.KERNELS.items() if new is not recurrent.mamba_training
}
REPLACED = {patch.target: patch for patch in PATCHES if patch.target not in OF_PACKAGES}


def names_of(function) -> tuple[list[str], list[str]]:
    """The parameters of a function, first those that may be given by position. Of gloo's groups they are those of the
    constructor with a time-out, by its documentation; of other builtins `input` stands for those that PyTorch hides."""
    if function is dist.ProcessGroupGloo:
        overload = re.search(r"\(self: [^,]*, (.*timeout.*)\) -> None", function.__init__.__doc__).group(1)
        names = re.findall(r"(\w+): ", overload)
        return names[:3], names[3:]
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return ["input"], []
    by_position = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return by_position, [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


def check_arguments(stand_in, function, before=()) -> None:
    """Raises TypeError unless the stand-in takes the arguments of a function, by position and by name, and one that no
    version has yet."""
    signature = inspect.signature(stand_in, follow_wrapped=False)
    by_position, by_name = names_of(function)
    signature.bind(*before, *by_position, **dict.fromkeys(by_name), of_a_later_version=None)
    number = 1 if by_position[:1] in (["self"], ["cls"], ["input"]) else 0
    named = dict.fromkeys(by_position[number:] + by_name)
    signature.bind(*before, *by_position[:number], **named, of_a_later_version=None)


@pytest.mark.parametrize("target", REPLACED)
def test_a_stand_in_takes_what_the_function_takes_and_more(target):
    patch, (owner, name) = REPLACED[target], owner_of(target)
    function = getattr(owner, name)
    inner = inspect.getclosurevars(patch.new).nonlocals.get("function") if patch.wraps else None
    if inner is not None:  # of `wrapping`, called with the old function first
        check_arguments(inner, function, before=[None])
    else:
        stand_in = patch.new(function) if patch.wraps else patch.new
        check_arguments(stand_in, function)
    if inspect.isclass(patch.new) and inspect.isclass(function):
        methods = [each for each in vars(patch.new) if not each.startswith("_") and callable(vars(patch.new)[each])]
        for method in methods:
            check_arguments(getattr(patch.new, method), getattr(function, method))


def test_a_group_of_gloo_keeps_the_options_of_later_versions():
    class Options:
        enable_reconfigure = False

    class Gloo:
        _Options = Options

        def __init__(self, store, rank, size, options):
            self.options = options

    group = stand_ins.on_one_device(Gloo)(None, 0, 1, timedelta(minutes=1), enable_reconfigure=True, unheard_of=1)
    assert group.options.enable_reconfigure is True and not hasattr(group.options, "unheard_of")


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
    parse(monkeypatch, "--cuda-graph-impl", "local", cuda_graph_impl="local")
    assert "--cuda-graph-impl local becomes none on the CPU" in caplog.text
    needs = "^--transformer-impl transformer_engine needs a GPU: .*; use --transformer-impl"
    with pytest.raises(ValueError, match=needs):  # but in a rehearsal, whose cluster has one
        parse(monkeypatch, "--transformer-impl", "transformer_engine")
    assert parse(monkeypatch, "--transformer-impl=transformer_engine", dry_run=True).transformer_impl == "local"
    # As Megatron parses for itself, without our flags.
    assert parse(monkeypatch, "--transformer-impl=transformer_engine", "--dry-run").transformer_impl == "local"
    assert parse(monkeypatch, "--profile", "--dry-run", profile=True).profile


@pytest.mark.parametrize("given", [None, hybrid_stack_spec, ModuleSpec(module=object)], ids=["none", "default", "own"])
def test_local_layers_stand_for_transformer_engines_only(given):
    transformer = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    model = SimpleNamespace(_model_config=SimpleNamespace(hybrid_stack_spec=given, transformer=transformer))
    found = stand_ins.build_from_local_layers(lambda self: self._model_config.hybrid_stack_spec, model)
    if given in (None, hybrid_stack_spec):
        assert found.module.__name__ == "LocalHybridStack"
    else:
        assert found is given
