"""Losses in pieces are those of kept logits, with all gradients, and nothing as large as logits is kept."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmark_host import add_as_ddp_does, moved_by_weight_of_loss
from megatron.seq1f1b.model.memory.loss_pieces import MOST_PIECES_KEPT, Logits, compute_loss_in_pieces
from megatron.seq1f1b.model.memory.weight_gradient import WeightGradientStore, defer_weight_gradients

TOKENS, SEQUENCES, HIDDEN, WORDS = 10, 2, 8, 16
ROW = SEQUENCES * WORDS
ALL = TOKENS * ROW
MANY = 10**6  # tokens


class Head(LanguageModule):
    """The end of a language model, as GPTModel and HybridModel have it."""

    def __init__(self, is_tied=False, factor=1.0, is_frozen=False, dtype=torch.float64) -> None:
        world = dist.group.WORLD
        sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 1, "params_dtype": dtype}
        config = TransformerConfig(**sizes, use_cpu_initialization=True, gradient_accumulation_fusion=False)
        super().__init__(config, ProcessGroupCollection(tp=world, cp=world, pp=world, embd=None))
        options = {"config": config, "init_method": torch.nn.init.normal_, "tp_group": world}
        options |= {"bias": False, "gather_output": False, "skip_weight_param_allocation": is_tied}
        self.output_layer = ColumnParallelLinear(HIDDEN, WORDS, **options)
        self.requires_grad_(not is_frozen)
        self.factor = factor
        self.tied = torch.nn.Parameter(torch.randn(WORDS, HIDDEN, dtype=dtype)) if is_tied else None

    def logits(self, hidden):
        logits, _ = self.output_layer(hidden, weight=self.tied)
        return logits * self.factor if self.factor != 1.0 else logits

    def forward(self, hidden, labels):
        return self.compute_language_model_loss(labels, self.logits(hidden))


@pytest.fixture
def groups(alone):
    """Model-parallel groups of one rank."""
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def batch():
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, SEQUENCES, HIDDEN, dtype=torch.float64, requires_grad=True)
    return hidden, torch.randint(WORDS, (SEQUENCES, TOKENS)), torch.randn(SEQUENCES, TOKENS, dtype=torch.float64)


def step(head):
    """Losses, and the gradients of hidden states and weights for a scale of each token's loss."""
    hidden, labels, scale = batch()
    losses = head(hidden, labels)
    learned = (weight for weight in head.parameters() if weight.requires_grad)
    return losses.detach(), *torch.autograd.grad((losses * scale).sum(), (hidden, *learned))


KINDS = {"plain": {}, "tied": {"is_tied": True}, "scaled": {"factor": 0.25}, "frozen": {"is_frozen": True}}


@pytest.mark.parametrize("piece", [1, 3 * ROW, ALL - 1])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_losses_and_gradients_are_those_of_kept_logits(groups, piece, options):
    head = Head(**options)
    expected = step(head)
    compute_loss_in_pieces([head], MANY, piece)
    assert head(*batch()[:2]).is_contiguous()  # so that a program can view them as one dimension
    for found, wanted in zip(step(head), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_nothing_as_large_as_logits_is_kept(groups):
    head, kept = Head(), []
    compute_loss_in_pieces([head], MANY, ROW)
    hidden, labels, _ = batch()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        head(hidden, labels)
    assert kept and all(tensor.untyped_storage().nbytes() <= hidden.nbytes for tensor in kept)


@pytest.mark.parametrize("piece", [None, ALL // MOST_PIECES_KEPT])
def test_few_logits_are_kept_and_without_pieces_all(groups, piece):
    head = Head()
    for given, is_kept in ((1, False), (piece, True), (ALL // MOST_PIECES_KEPT - 1, False)):
        compute_loss_in_pieces([head], TOKENS * SEQUENCES, given)
        assert isinstance(head.logits(batch()[0]), torch.Tensor) is is_kept


def test_whatever_else_reads_logits_gets_them_whole(groups):
    head, (hidden, *_) = Head(), batch()
    wanted = head.logits(hidden)
    compute_loss_in_pieces([head], MANY, 3 * ROW)
    logits = head.logits(hidden)
    assert isinstance(logits, Logits) and logits.shape == wanted.shape and logits.size(-1) == WORDS
    # Some processors round a product of few rows otherwise than the same rows of a larger one.
    rounding = {"rtol": 1e-14, "atol": 1e-14}
    torch.testing.assert_close(logits.transpose(0, 1).contiguous(), wanted.transpose(0, 1), **rounding)
    torch.testing.assert_close(torch.softmax(logits, dim=-1), torch.softmax(wanted, dim=-1), **rounding)
    assert torch.equal(torch.argmax(logits, dim=-1), wanted.argmax(dim=-1))
    assert torch.equal(torch.argmax(logits, -1), wanted.argmax(dim=-1))
    assert torch.equal(torch.argmax(logits), wanted.argmax())
    torch.testing.assert_close(logits.max(dim=-1)[0], wanted.max(dim=-1)[0])
    gathered, _ = head.output_layer(hidden, runtime_gather_output=True)
    assert torch.equal(gathered, wanted)


def test_weight_gradients_of_pieces_are_not_left_for_later(groups):
    """They would hold gradients as large as logits until then."""
    store, head = WeightGradientStore(), Head()
    compute_loss_in_pieces([head], MANY, ROW)
    store.unit = "unit"
    with defer_weight_gradients(store, [head]):
        hidden, labels, _ = batch()
        head(hidden, labels).sum().backward()
        assert head.output_layer.weight.grad is not None and not store._deferred


def under_ddp(weight, dtype=torch.float64):
    """Ones in `main_grad`, to which Megatron's hook adds what is not marked as added."""
    weight.main_grad = torch.ones_like(weight, dtype=dtype)
    weight.grad_added_to_main_grad = False
    weight.register_post_accumulate_grad_hook(add_as_ddp_does)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_other_gradients_of_the_weight_are_added_too(groups, monkeypatch, is_tied, fused):
    """Those of logits that a program reads, and of an embedding, in units of their own and in that of a loss."""
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=lambda rows, grad, main_grad: main_grad.addmm_(grad.t(), rows))
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    head = Head(is_tied, dtype=torch.float32 if fused else torch.float64)
    weight, (hidden, labels, _) = head.tied if is_tied else head.output_layer.weight, batch()
    hidden = hidden.detach().to(weight.dtype)

    def tokens():
        return torch.nn.functional.embedding(labels.t(), weight) if is_tied else hidden

    def units():
        logits = head.logits(hidden)
        of_logits = torch.square(logits).sum() + logits.max(dim=-1)[0].sum()
        yield head(hidden, labels).sum()
        yield of_logits
        yield head(tokens(), labels).sum()
        yield 3 * head(tokens(), labels).sum() + 2 * torch.square(head.logits(tokens())).sum()

    expected = 1 + sum(torch.autograd.grad(loss, weight)[0] for loss in units())
    compute_loss_in_pieces([head], MANY, 3 * ROW)
    head.output_layer.gradient_accumulation_fusion = fused
    under_ddp(weight, weight.dtype)
    for loss in units():
        loss.backward()
    tolerance = 1e-5 if fused else 1e-12
    torch.testing.assert_close(weight.main_grad, expected, rtol=tolerance, atol=tolerance)


def test_a_unit_adds_its_weight_gradient_once_for_each_piece():
    """It writes no zeros, and nothing adds them."""
    assert [moved_by_weight_of_loss(64 * pieces, pieces).kernels for pieces in (1, 4)] == [1, 4]


MAIN_GRADS = {"none": None, "bf16": torch.bfloat16, "fp32": torch.float32, "fused": torch.float32}


@pytest.mark.parametrize("kind", MAIN_GRADS)
def test_gradients_of_pieces_add_up_in_fp32(groups, monkeypatch, kind):
    """Those of 16-bit weights, to one rounding; in a `main_grad`, which hooks add nothing to, to its own.

    Apex's kernel, called by Megatron's layer, adds to the same sum; of 32 bit here, for it rounds nothing.
    """
    dtype = torch.float32 if kind == "fused" else torch.bfloat16
    head = Head(dtype=dtype)
    weight = head.output_layer.weight
    hidden, labels, _ = batch()
    hidden = hidden.detach().to(dtype)
    of_tokens = (head(hidden[i : i + 1], labels[:, i : i + 1]).sum() for i in range(TOKENS))
    expected = sum(torch.autograd.grad(loss, weight)[0].float() for loss in of_tokens)
    compute_loss_in_pieces([head], MANY, ROW)
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=lambda rows, grad, main_grad: main_grad.addmm_(grad.t(), rows))
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    head.output_layer.gradient_accumulation_fusion = kind == "fused"
    if kind != "none":
        under_ddp(weight, MAIN_GRADS[kind])
    head(hidden, labels).sum().backward()
    if kind == "none":
        assert torch.equal(weight.grad, expected.bfloat16())
    else:
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, (1 + expected).to(MAIN_GRADS[kind]), rtol=1e-6, atol=1e-5)
