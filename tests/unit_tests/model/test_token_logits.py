"""Log-probabilities and entropies of tokens in pieces are those of whole logits, with all gradients."""

from functools import partial

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import float16_to_fp32
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.seq1f1b.model import PieceLogits, Segment, token_log_probs, token_log_probs_and_entropy
from megatron.seq1f1b.model.memory.loss_pieces import compute_loss_in_pieces
from megatron.seq1f1b.runtime.model_calls.outputs import Outputs
from unit_tests.model.test_loss_pieces import HIDDEN, MANY, ROW, SEQUENCES, TOKENS, WORDS, Head

SEGMENTS = [Segment(0, index, *bounds, TOKENS) for index, bounds in enumerate([(0, 5), (5, 8), (8, TOKENS)])]
TEMPERATURE = 0.7


@pytest.fixture
def groups(alone):
    """Model-parallel groups of one rank."""
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def batch(dtype=torch.float64):
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, SEQUENCES, HIDDEN, dtype=dtype, requires_grad=True)
    scales = torch.randn(2, SEQUENCES, TOKENS, dtype=torch.float64)
    return hidden, torch.randint(WORDS, (SEQUENCES, TOKENS)), scales


def by_torch(logits, tokens):
    """What a program computes by itself from whole logits."""
    log_probs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return log_probs.gather(-1, tokens[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def in_pieces(logits, tokens):
    return token_log_probs_and_entropy(logits, tokens, TEMPERATURE)


def logits_of(head, hidden):
    """As GPTModel and HybridModel return them."""
    return head.logits(hidden).transpose(0, 1).contiguous()


def step(head, values, segments=None):
    """Values, and the gradients of hidden states and weights, perhaps over several segments."""
    hidden, tokens, scales = batch()
    outputs = Outputs(TOKENS)
    if segments is None:
        logits, backwards = logits_of(head, hidden), []
    else:
        backwards = [outputs.add(logits_of(head, hidden[each.start : each.end]), each) for each in segments]
        logits = outputs.joined()
    found = values(logits, tokens)
    loss = sum((each * scale).sum() for each, scale in zip(found, scales, strict=True))
    loss.backward()
    for each in reversed(backwards):
        each.backward(torch.ones_like(each))
    return *(each.detach() for each in found), hidden.grad, *(weight.grad for weight in head.parameters())


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


KINDS = {"plain": {}, "tied": {"is_tied": True}, "scaled": {"factor": 0.25}, "frozen": {"is_frozen": True}}
HOW = {"whole": None, "segments": SEGMENTS}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def heads(groups, request):
    """A head and its copy, which computes pieces."""
    torch.manual_seed(2)
    heads = Head(**request.param), Head(**request.param)
    heads[1].load_state_dict(heads[0].state_dict())
    compute_loss_in_pieces([heads[1]], MANY, 3 * WORDS)
    return heads


@pytest.mark.parametrize("segments", HOW.values(), ids=HOW)
def test_values_and_gradients_are_those_of_whole_logits(heads, segments):
    assert_same(step(heads[1], in_pieces, segments), step(heads[0], by_torch))


@pytest.mark.filterwarnings("ignore:the program reads logits")
@pytest.mark.parametrize("segments", HOW.values(), ids=HOW)
def test_whoever_reads_logits_gets_them_whole_with_gradients(heads, segments):
    """Also after a change in place, by operations of autograd's own functions, and besides those in pieces."""

    def changes(values, logits, tokens):
        assert isinstance(logits, torch.Tensor)
        log_probs, _ = values(logits, tokens)
        logits.div_(2)
        logits[:, 0].mul_(3)
        return log_probs, torch.special.entr(torch.softmax(logits, -1)).sum(-1) + token_log_probs(logits, tokens)

    found = step(heads[1], partial(changes, in_pieces), segments)
    assert_same(found, step(heads[0], partial(changes, by_torch)))


def test_plain_logits_are_taken_as_they_are(groups):
    _, tokens, _ = batch()
    logits = torch.randn(SEQUENCES, TOKENS, WORDS, dtype=torch.float64)
    logits[..., -2:] = -torch.inf
    tokens %= WORDS - 2
    found = logits.clone().requires_grad_()
    wanted = logits.clone().requires_grad_()
    found_log_probs, _ = in_pieces(found, tokens)
    wanted_log_probs, _ = by_torch(wanted, tokens)
    found_log_probs.square().sum().backward()
    wanted_log_probs.square().sum().backward()
    assert_same((found_log_probs.detach(), found.grad), (wanted_log_probs.detach(), wanted.grad))
    assert in_pieces(logits, tokens)[1].isfinite().all()


def test_tokens_outside_of_the_vocabulary_get_no_gradient():
    logits = torch.randn(1, 3, WORDS, requires_grad=True)
    log_probs = token_log_probs(logits, torch.tensor([[-100, 2, WORDS]]))
    log_probs.sum().backward()
    assert log_probs[0, 0] == log_probs[0, 2] == 0 and not logits.grad[0, [0, 2]].any() and logits.grad[0, 1].any()
    with pytest.raises(ValueError, match=r"tokens of shape \[3\] by logits of shape \[1, 3, 16\]; give one token"):
        token_log_probs(logits, torch.tensor([1, 2, 3]))


class Largest(TorchDispatchMode):
    """The largest tensor, in numbers, that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not isinstance(each, PieceLogits):
                self.numbers = max(self.numbers, each.numel())
        return result


@pytest.mark.parametrize("values, is_small", [(in_pieces, True), (by_torch, False)], ids=["in pieces", "whole"])
@pytest.mark.filterwarnings("ignore:the program reads logits")
def test_no_tensor_is_larger_than_hidden_states_or_a_piece(groups, values, is_small):
    head = Head()
    compute_loss_in_pieces([head], MANY, 3 * WORDS)
    with Largest() as largest:
        step(head, values, SEGMENTS)
    assert (largest.numbers <= max(TOKENS * SEQUENCES * HIDDEN, WORDS * HIDDEN)) is is_small


MAIN_GRADS = {"fp32": (torch.float32, False), "away": (torch.float32, True), "bf16": (torch.bfloat16, False)}


@pytest.mark.parametrize("main_grad, is_away", MAIN_GRADS.values(), ids=MAIN_GRADS)
def test_the_hook_of_the_weight_fires_once_a_segment(groups, main_grad, is_away):
    """In fp32, which no piece rounds; never before the backward of a segment where `main_grad` is away."""
    head = Head(dtype=torch.bfloat16)
    compute_loss_in_pieces([head], MANY, WORDS)
    weight = head.output_layer.weight
    fired = []
    head.output_layer.gradient_is_away = is_away
    hidden, tokens, scales = batch(torch.bfloat16)
    weight.main_grad = torch.ones_like(weight, dtype=main_grad)
    weight.register_post_accumulate_grad_hook(lambda weight: fired.append(bool(weight.grad.any())))
    outputs = Outputs(TOKENS)
    backwards = [outputs.add(logits_of(head, hidden[each.start : each.end]), each) for each in SEGMENTS]
    (token_log_probs(outputs.joined(), tokens) * scales[0]).sum().backward()
    has_gradient = not torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))
    assert not fired and has_gradient is (main_grad is torch.float32 and not is_away)
    for each in reversed(backwards):
        each.backward(torch.ones_like(each))
    assert fired == [False] * len(SEGMENTS)
    logits = torch.nn.functional.linear(hidden.detach(), weight.detach()).double().transpose(0, 1).requires_grad_()
    (torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0] * scales[0]).sum().backward()
    rows = logits.grad.transpose(0, 1).flatten(0, 1).bfloat16().double()
    of_pieces = rows.t() @ hidden.detach().flatten(0, 1).double()
    torch.testing.assert_close(weight.main_grad, (1 + of_pieces).to(main_grad), rtol=0.01, atol=0.02)


def test_no_gradients_no_graph(groups):
    head = Head()
    compute_loss_in_pieces([head], MANY, ROW)
    hidden, tokens, _ = batch()
    with torch.no_grad():
        logits = logits_of(head, hidden)
        log_probs = token_log_probs(logits, tokens)
    assert not log_probs.requires_grad and not logits.is_whole
    detached = logits_of(head, hidden).detach()
    assert isinstance(detached, PieceLogits) and not token_log_probs(detached, tokens).requires_grad


def test_a_16_bit_module_computes_no_logits_for_32_bits(groups):
    head = Head(dtype=torch.bfloat16)
    compute_loss_in_pieces([head], MANY, ROW)
    hidden, tokens, _ = batch(torch.bfloat16)
    logits = logits_of(head, hidden)
    found = float16_to_fp32(logits)
    assert found.dtype is torch.float32 and isinstance(found, PieceLogits) and not found.is_whole
    compute_loss_in_pieces([head], MANY, None)
    wanted, _ = by_torch(logits_of(head, hidden).float(), tokens)
    torch.testing.assert_close(in_pieces(found, tokens)[0], wanted, rtol=1e-5, atol=1e-5)


def test_reading_whole_logits_warns(groups):
    head = Head()
    compute_loss_in_pieces([head], MANY, ROW)
    logits = logits_of(head, batch()[0])
    with pytest.warns(UserWarning, match="token_log_probs takes log-probabilities and entropies from them in pieces"):
        logits.sum()
