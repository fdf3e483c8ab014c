"""Experts whose forward is repeated in the backward of a plan (--recompute-modules moe).

The first forward of a mixture of experts leaves no graph but that of the exchange back, which saves indices alone. In
the backward of its layer, routing is repeated before the gradients travel to the experts, the tokens travel behind
them, and the experts compute once more: so both exchanges pass beside the attention of the forward in the pair.

    exchange:         gradients, tokens again | tokens of the forward ...
    compute:   routing again | attention of the forward | experts again, experts' backward ...

Megatron repeats a mixture of experts as a whole within its backward, where nothing runs beside it, so its plans refuse
to. Layers of multi-token prediction have a mixture of experts in a layer of their own.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.utils import ScheduleNode, get_comp_stream
from megatron.core.tensor_parallel.random import _fork_rng, _get_all_rng_states, _set_all_rng_states
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from ...model import tensor_of
from ...process.patches import patched_on, wrapping

_MOE = "megatron.core.transformer.moe.moe_layer.MoELayer"
_ON_ITS_INPUT = "shared_experts_compute", "route", "preprocess"
Tensors = tuple[Tensor, ...]
# Lets a function run under the segment of a unit.
Under = Callable[[Callable[..., Any]], Callable[..., Any]]
# Makes a handle of a tensor that may move to the host, see HostMemory.
Keep = Callable[[Tensor], Any]


class _Slot(NamedTuple):
    """Takes the place of a node in the plan of a layer."""

    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any]
    backward_dw: Callable[[], None]


def repeat_experts(plan_of_layer: Any, under: Under, keep: Keep) -> None:
    """Let a layer's plan, in which no node has run, repeat its mixture of experts, if the model is to recompute it.
    What it repeats runs `under` the segment; it starts from an input that it `keep`s."""
    layer = plan_of_layer.layer
    layer = getattr(layer, "mtp_model_layer", layer)
    if isinstance(layer.mlp, MoELayer) and layer.mlp.moe_layer_recompute:
        _RepeatedExperts(plan_of_layer, layer, under, keep).take_places(plan_of_layer)


class _RepeatedExperts:
    """The mixture of experts of one layer and unit, from its forward to its backward."""

    def __init__(self, plan_of_layer: Any, layer: Any, under: Under, keep: Keep) -> None:
        self._layer = layer
        self._moe: Any = layer.mlp
        self._before = plan_of_layer.pre_dispatch_computation
        self._dispatch = plan_of_layer.moe_dispatch
        self._experts = plan_of_layer.mlp
        self._combine = plan_of_layer.moe_combine
        again = ScheduleNode(under(self._routed_again), get_comp_stream, plan_of_layer.event, name="route again")
        again.backward_func = under(again.backward_func)
        self._route_again = again
        self._keep = keep
        self._normed: Tensor | None = None  # the input of the mixture of experts, until its node has run
        self._input: Any = None  # the same, kept and without a graph
        self._shared: Tensors = ()  # the output of shared experts in the first forward, a leaf
        self._dispatched: Any = None  # again
        self._random_states: Any = None  # those of generators before the first forward
        self._norm: Any = None  # discards the input, and makes it again
        self._dispatcher_state: list[dict[str, Any]] = []

    def take_places(self, plan_of_layer: Any) -> None:
        """Stand in for the nodes of the layer."""
        dispatch = self._dispatch
        plan_of_layer.pre_dispatch_computation = _Slot(
            forward=self._first_before,
            backward=self._backward_before,
            backward_dw=self._before.backward_dw,
        )
        plan_of_layer.moe_dispatch = _Slot(
            forward=self._first_dispatch,
            backward=dispatch.backward,
            backward_dw=dispatch.backward_dw,
        )
        plan_of_layer.mlp = _Slot(
            forward=self._first_experts,
            backward=self._backward_experts,
            backward_dw=self._experts.backward_dw,
        )
        plan_of_layer.moe_combine = _Slot(
            forward=self._combine.forward,
            backward=self._backward_combine,
            backward_dw=self._combine.backward_dw,
        )

    # The first forward.

    def _first_before(self, hidden_states: Any) -> Any:
        # Were they kept, no part of this object would be freed before the garbage collector runs.
        patches = tuple(wrapping(f"{_MOE}.{name}", self._without_graph, "runs twice") for name in _ON_ITS_INPUT)
        with patched_on([self._moe], patches):
            routed = self._before.forward(hidden_states)
        node = self._before
        residual, *shared = node.detached
        for output in shared:
            output.requires_grad_()  # for its gradient, which goes on from the repeated one
        self._shared = tuple(shared)
        if self._layer.recompute_pre_mlp_layernorm:
            self._norm = self._layer.pre_mlp_norm_checkpoint
        # What goes backward of this node: the residual, and the input of the experts in place of routed tokens.
        node.detached = (residual,)
        node.before_detached = node.before_detached[:1]
        node.output = self._normed
        self._normed = None
        return routed

    def _without_graph(self, moe: Any, compute: Callable[..., Any], hidden_states: Tensor, *others: Any) -> Any:
        """A part of the mixture of experts that computes on its input, in the first forward."""
        if self._input is None:
            self._random_states = _get_all_rng_states()
            self._normed = hidden_states
            self._input = self._keep(hidden_states.detach())
        with torch.no_grad():
            return compute(hidden_states, *others)

    def _first_dispatch(self, routed: Any) -> Any:
        with torch.no_grad():
            dispatched = self._dispatch.forward(routed)
        _forget(self._dispatch)
        return dispatched

    def _first_experts(self, dispatched: Any) -> Tensor:
        with torch.no_grad():
            output = self._experts.forward(dispatched)
        _forget(self._experts)
        return output.requires_grad_()  # for its gradient, from which the repeated ones go backward

    # The backward, with the repeated forward.

    def _backward_combine(self, gradient: Any) -> Any:
        with self._dispatcher_of_unit():
            routed = self._route_again.forward(tensor_of(self._input).requires_grad_())
        self._input = None
        gradient = self._combine.backward(gradient)
        with self._dispatcher_of_unit():
            self._dispatched = self._dispatch.forward(routed[:2])
        return gradient

    def _routed_again(self, hidden_states: Tensor) -> Tensors:
        if self._norm is not None:
            self._norm._recompute(None)
        with _fork_rng():
            _set_all_rng_states(*self._random_states)
            shared = self._moe.shared_experts_compute(hidden_states)
            tokens, probs = self._moe.preprocess(hidden_states, *self._moe.route(hidden_states))
        return (tokens, probs) if shared is None else (tokens, probs, shared)

    def _backward_experts(self, gradient: Any) -> Any:
        discards = self._layer.recompute_pre_mlp_layernorm
        self._layer.recompute_pre_mlp_layernorm = False  # its output is needed from now on
        try:
            with self._dispatcher_of_unit():
                self._experts.forward(self._dispatched)
        finally:
            self._layer.recompute_pre_mlp_layernorm = discards
        self._dispatched = None
        return self._experts.backward(gradient)

    def _backward_before(self, gradients: Tensors) -> Any:
        of_shared = (output.grad for output in self._shared)
        return self._before.backward(self._route_again.backward((*gradients, *of_shared)))

    @contextmanager
    def _dispatcher_of_unit(self) -> Iterator[None]:
        """Inside, the dispatcher of tokens has what it noted of this unit. The forward beside may be on its way through
        the same layer."""
        dispatcher = self._moe.token_dispatcher
        keepers = [dispatcher]
        manager = getattr(dispatcher, "_comm_manager", None)  # of the flex dispatcher
        if manager is not None:
            keepers.append(manager)
        of_others = [dict(vars(keeper)) for keeper in keepers]
        for keeper, state in zip(keepers, self._dispatcher_state, strict=False):  # there is none the first time
            vars(keeper).update(state)
        try:
            yield
        finally:
            self._dispatcher_state = [dict(vars(keeper)) for keeper in keepers]
            for keeper, state in zip(keepers, of_others, strict=True):
                vars(keeper).clear()
                vars(keeper).update(state)


def _forget(node: Any) -> None:
    """Let go what a node keeps of its forward."""
    node.inputs = None
    node.output = None
    node.detached = ()
    node.before_detached = ()
