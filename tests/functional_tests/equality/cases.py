"""What the equality tests vary beside the model: how it is cut over ranks, and one training step."""

from dataclasses import dataclass

from functional_tests.equality.models import SEQUENCE
from megatron.seq1f1b.partition import even
from megatron.seq1f1b.schedule import Placement


@dataclass(frozen=True)
class Layout:
    """How a model is cut over ranks; the remaining factor is data parallelism."""

    pipeline: int = 1
    chunks: int = 1
    tensor: int = 1
    context: int = 1
    gathers_keys: bool = False
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int | None = None
    overlap: bool = False
    align: bool = False
    distributed_optimizer: bool = False
    style: str = "looped"
    # Megatron's --pipeline-model-parallel-layout.
    parts: str | None = None

    @property
    def label(self) -> str:
        """What its sizes leave out."""
        words = {
            "sp": self.sequence_parallel,
            "gather": self.gathers_keys,
            f"c{self.chunks}": self.chunks > 1,
            "v": self.style == "v",
            "overlap": self.overlap,
            "align": self.align,
            "sharded": self.distributed_optimizer,
        }
        return "-".join([word for word, holds in words.items() if holds] + (self.parts or "").split("|")).strip("-")

    @property
    def placement(self) -> Placement:
        return Placement(self.pipeline, self.chunks, self.style)


@dataclass(frozen=True)
class Case:
    """One step of `m` micro-batches of `batch` sequences. Segments are multiples of `multiple` tokens; `packed` is how
    a batch marks the documents of its sequences, which "units" of as many tokens as the first segment take apart.
    """

    family: str
    k: int
    m: int
    split: str
    mask: str
    packed: str | None = None
    multiple: int = 2
    batch: int = 2

    @property
    def label(self) -> str:
        words = (self.family, f"k{self.k}", f"m{self.m}", self.split, self.mask, self.packed)
        words += (f"b{self.batch}",) * (self.batch != 2)
        return "-".join(filter(None, words))

    @property
    def lengths(self) -> tuple[int, ...]:
        if self.split in ("even", "documents"):
            return even(SEQUENCE, self.k, self.multiple)
        shrinking = [self.multiple * (self.k - i) for i in range(self.k)]
        return (SEQUENCE - sum(shrinking[1:]), *shrinking[1:])
