"""Programs in the manner of frameworks for post-training, drawn at random: what their iterators yield, where they pack
and shift, what their losses return."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor

from functional_tests.equality.models import VOCABULARY

# How the iterator hands out a micro-batch.
FORMS = ("dict", "list of jagged", "dataclass", "tensor dictionary", "get_next")
# Sequences side by side, padded at the end, or packed one behind the other, in the iterator or in the forward step.
LAYOUTS = ("rows", "padded rows", "packed before", "packed inside", "packed and padded")
# What the model is called with: labels, shifted before or inside; or none, and log-probabilities come from logits.
TARGETS = ("labels", "labels shifted inside", "logits", "logits in place")
# Means of losses, by what they return.
LOSSES = (
    "sums",
    "token mean",
    "sequence mean",
    "mean over the global batch",
    "num_tokens of 1",
    "clipped policy",
    "score of the last token",
    "two losses of one output",
)
TEMPERATURE = 0.8
REPORTS = ("dictionary", "pair", "numbers", "list", "nothing", "object")


@dataclass(frozen=True)
class Program:
    """One program, by names of the lists above, with `microbatches` of random sequences."""

    form: str
    layout: str
    targets: str
    loss: str
    report: str
    microbatches: int
    is_variable: bool
    seed: int
    embeds: bool = False  # by itself, before it calls the model

    @classmethod
    def drawn(cls, seed: int) -> Program:
        """The program of a seed."""
        choose = random.Random(seed).choice
        layout = choose(LAYOUTS)
        return cls(
            form=choose(FORMS),
            layout=layout,
            targets=choose(TARGETS),
            loss=choose(LOSSES),
            report=choose(REPORTS),
            microbatches=choose((1, 2, 3, 5)),
            is_variable=choose((True, True, False)),
            seed=seed,
            embeds=choose((True, False, False)),
        )

    def data(self, divisor: int = 1, replica: int = 0) -> list[list[dict[str, Tensor]]]:
        """The sequences of each micro-batch of a replica. Micro-batches of rows have equally many, packs any number.
        The tokens of rows and of packed sequences are a multiple of `divisor`."""
        draw = random.Random(1000 * self.seed + replica)
        generator = torch.Generator().manual_seed(1000 * self.seed + replica)
        same = divisor * draw.randint(-(-8 // divisor), 32 // divisor)
        found = []
        for _ in range(self.microbatches):
            count = 2 if "rows" in self.layout else draw.randint(1, 4)
            length = divisor * draw.randint(-(-8 // divisor), 40 // divisor) if self.is_variable else same
            if self.layout == "rows":
                lengths = [length] * count
            elif self.layout == "padded rows":
                lengths = [length, draw.randint(2, length)]
            else:
                unit = max(2, divisor)
                lengths = _parts(length, unit, min(count, length // unit), draw)
            found.append([self._sequence(each, generator) for each in lengths])
        return found

    def _sequence(self, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        numbers = partial(torch.randn, length, generator=generator, dtype=torch.float64)
        return {
            "tokens": torch.randint(VOCABULARY, (length,), generator=generator),
            "advantages": numbers(),
            "old": -4 + numbers(),
            "mask": (torch.rand(length, generator=generator) < 0.8).double(),
        }

    def iterator(self, data: list[list[dict[str, Tensor]]]) -> object:
        return _ITERATORS[self.form](data)

    def forward_step(self, num_tokens: float) -> Callable:
        """The forward step of the program; `num_tokens` is the number of the global batch."""
        return partial(_forward_step, self, num_tokens)


def _parts(length: int, unit: int, count: int, draw: random.Random) -> list[int]:
    """A length in parts, each but the last a multiple of `unit` tokens."""
    cuts = sorted(draw.sample(range(1, length // unit), count - 1)) if count > 1 else []
    bounds = [0, *(unit * cut for cut in cuts), length]
    return [end - start for start, end in pairwise(bounds)]


@dataclass
class Samples:
    """A micro-batch as a dataclass."""

    sequences: list[dict[str, Tensor]]


class TensorDictionary:
    """A micro-batch by columns, as frameworks' own containers have it: no mapping, no sequence."""

    def __init__(self, sequences: list[dict[str, Tensor]]) -> None:
        self._columns = {
            name: torch.nested.nested_tensor([each[name] for each in sequences], layout=torch.jagged)
            for name in sequences[0]
        }

    def sequences(self) -> list[dict[str, Tensor]]:
        columns = {name: column.unbind() for name, column in self._columns.items()}
        return [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]


class Loader:
    """An iterator without `__next__`, as slime has it."""

    def __init__(self, data: list[list[dict[str, Tensor]]]) -> None:
        self._data = iter(data)

    def get_next(self) -> list[dict[str, Tensor]]:
        return next(self._data)


_ITERATORS: dict[str, Callable] = {
    "dict": lambda data: iter([{"sequences": each, "name": "batch"} for each in data]),
    "list of jagged": iter,
    "dataclass": lambda data: iter(list(map(Samples, data))),
    "tensor dictionary": lambda data: iter(list(map(TensorDictionary, data))),
    "get_next": Loader,
}


def _read(iterator: object) -> list[dict[str, Tensor]]:
    if isinstance(iterator, Loader):
        return iterator.get_next()
    batch = next(iterator)
    if isinstance(batch, dict):
        return batch["sequences"]
    if isinstance(batch, Samples):
        return batch.sequences
    return batch.sequences() if isinstance(batch, TensorDictionary) else batch


def _forward_step(program: Program, num_tokens: float, iterator: object, model: torch.nn.Module) -> tuple:
    sequences = _read(iterator)
    lengths = [len(each["tokens"]) for each in sequences]
    is_packed = "packed" in program.layout
    rows = [each["tokens"] for each in sequences]
    if is_packed:
        tokens = torch.cat(rows)[None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        packed = PackedSeqParams("thd", ends, ends, None, None, max(lengths), max(lengths))
        if program.layout == "packed and padded":  # real lengths, and those with the padding between documents
            real = torch.tensor([0, *accumulate(length - 1 for length in lengths)], dtype=torch.int32)
            packed = PackedSeqParams("thd", real, real, ends, ends, max(lengths), max(lengths))
        where = [(0, end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]
    else:
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        positions = torch.arange(tokens.shape[1]).expand(len(rows), -1)
        packed = None
        where = [(row, 0, length) for row, length in enumerate(lengths)]
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    arguments = {"packed_seq_params": packed} if is_packed else {}
    labels = tokens.roll(-1, dims=1)
    runs = [(start, end) for _, start, end in where] if is_packed else [(0, length)]
    share = ContextShare(runs)
    if program.targets.startswith("labels"):
        arguments["labels"] = share.of(labels)
    if program.embeds and unwrapped(model).pre_process:
        arguments["decoder_input"] = unwrapped(model).embedding(share.of(tokens), share.of(positions))
    output = model(share.of(tokens), share.of(positions), None if is_packed else mask, **arguments)
    if not unwrapped(model).post_process:
        return output, None
    if program.targets == "logits in place":
        output.div_(TEMPERATURE)
    output = share.gathered(output)
    log_probs = _log_probs(program, output, labels)
    of_sequences = [
        (log_probs[row, start : end - 1], each) for (row, start, end), each in zip(where, sequences, strict=True)
    ]
    if not program.targets.startswith("labels"):
        output = gather_from_tensor_model_parallel_region(output)
    scores = [output[row, end - 1].reshape(-1)[0] for row, start, end in where]
    loss_func = partial(_loss, program, num_tokens, of_sequences, scores)
    return output, loss_func


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while hasattr(model, "module"):
        model = model.module
    return model


class ContextShare:
    """A context-parallel rank's zigzag share of tokens [b, s], of each of the `runs` that they consist of."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        self._group = parallel_state.get_context_parallel_group()
        size = self._group.size()
        self._of_ranks: list[list[int]] = [[] for _ in range(size)]
        for start, end in runs:
            parts = torch.arange(start, end).chunk(2 * size)
            for rank, positions in enumerate(self._of_ranks):
                positions += [*parts[rank].tolist(), *parts[2 * size - 1 - rank].tolist()]

    def of(self, tokens: Tensor) -> Tensor:
        return tokens[:, self._own] if self._group.size() > 1 else tokens

    def gathered(self, output: Tensor) -> Tensor:
        """The outputs of all ranks, as frameworks gather them: gradients go to this rank's own."""
        if self._group.size() == 1:
            return output
        of_ranks = [torch.empty_like(output) for _ in self._of_ranks]
        dist.all_gather(of_ranks, output.detach().contiguous(), group=self._group)
        in_turn = torch.cat(of_ranks, dim=1)
        whole = torch.empty_like(in_turn)
        whole[:, torch.tensor([position for positions in self._of_ranks for position in positions])] = in_turn
        whole[:, self._own] = output
        return whole

    @property
    def _own(self) -> Tensor:
        return torch.tensor(self._of_ranks[self._group.rank()])


def _log_probs(program: Program, output: Tensor, labels: Tensor) -> Tensor:
    """Of each token but the first, [b, s], at the place of the token before."""
    if program.targets.startswith("labels"):
        return -output.double()
    output = gather_from_tensor_model_parallel_region(output)
    return torch.log_softmax(output.double(), dim=-1).gather(-1, labels[..., None])[..., 0]


def _loss(program: Program, num_tokens: float, of_sequences: list, scores: list[Tensor], _: Tensor) -> tuple:
    pairs = [(log_probs, each["mask"][1:], each["advantages"][1:], each["old"][1:]) for log_probs, each in of_sequences]
    total = sum((-log_probs * mask).sum() for log_probs, mask, _, _ in pairs)
    count = sum(mask.sum() for _, mask, _, _ in pairs)
    kind = program.loss
    # With three values Megatron takes the mean over context-parallel ranks for that of their shares.
    num_shares = parallel_state.get_context_parallel_world_size()
    if kind == "sums":
        return total * num_shares, count.int(), _report(program, total, count)
    if kind == "num_tokens of 1":
        return total / num_tokens * num_shares, torch.tensor(1), _report(program, total, count)
    if kind == "token mean":
        loss = total / count.clamp(min=1)
    elif kind == "sequence mean":
        loss = sum((-log_probs * mask).sum() / mask.sum().clamp(min=1) for log_probs, mask, _, _ in pairs) / len(pairs)
    elif kind == "mean over the global batch":
        loss = total / num_tokens
    elif kind == "clipped policy":
        loss = 0
        for log_probs, mask, advantages, old in pairs:
            ratio = (log_probs - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = loss + (torch.max(-ratio * advantages, -clipped * advantages) * mask).mean() / len(pairs)
    elif kind == "score of the last token":
        loss = -torch.stack(scores).double().sigmoid().log().mean()
    else:
        entropy = torch.cat([log_probs for log_probs, *_ in pairs]).exp().std()
        loss = total / count.clamp(min=1) + 0.1 * entropy
    return loss, _report(program, loss, count)


def _report(program: Program, loss: Tensor, count: Tensor) -> object:
    kind = program.report
    if kind == "dictionary":
        return {"loss": loss.detach().clone(), "shape": tuple(loss.shape), "name": "text"}
    if kind == "pair":
        return {"loss": torch.stack([loss.detach(), count.to(loss)])}
    if kind == "numbers":
        return {"loss": loss.item(), "count": float(count)}
    if kind == "list":
        return [loss.detach().clone(), count]
    if kind == "nothing":
        return None
    return SimpleNamespace(loss=loss.detach().clone(), count=count)


def of_report(report: object) -> list[float]:
    """The numbers of a report, to compare."""
    if report is None:
        return []
    if isinstance(report, SimpleNamespace):
        report = vars(report)
    if isinstance(report, dict):
        report = list(report.values())
    numbers: list[float] = []
    for each in report:
        if isinstance(each, Tensor):
            numbers += each.double().flatten().tolist()
        elif isinstance(each, (int, float)):
            numbers.append(float(each))
    return numbers


class EachAlone(torch.nn.Module):
    """A model that runs every document of a pack by itself, with Megatron's own attention: what packs should give."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, **named: Tensor) -> Tensor:
        packed = named.pop("packed_seq_params", None)
        if packed is None:
            return self.module(tokens, positions, mask, **named)
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        outputs = []
        embedded = named.pop("decoder_input", None)
        is_divided = unwrapped(self).config.sequence_parallel
        if embedded is not None and is_divided:
            embedded = gather_from_sequence_parallel_region(embedded, tensor_parallel_output_grad=False)
        for start, end in _pairs(ends.tolist()):
            of_document = {name: value[:, start:end] for name, value in named.items()}
            if embedded is not None:
                rows = embedded[start:end]
                of_document["decoder_input"] = scatter_to_sequence_parallel_region(rows) if is_divided else rows
            causal = torch.ones(1, 1, end - start, end - start, dtype=torch.bool).triu(1)
            outputs.append(self.module(tokens[:, start:end], positions[:, start:end], causal, **of_document))
        return torch.cat(outputs, dim=1)


def _pairs(bounds: list[int]) -> Iterator[tuple[int, int]]:
    return pairwise(bounds)
