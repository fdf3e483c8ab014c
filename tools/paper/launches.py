"""The runs behind the published tables, as flags of pretrain_gpt.py: the authors' sizes, methods and precision."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.seq1f1b.commands.launch_flags import decided_flags
from megatron.seq1f1b.commands.model_flags import training_flags
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.simulator import Prediction, predict
from megatron.seq1f1b.planner.space import Candidate

from . import megatron_tables, seq1f1b_tables, terapipe_tables, zero_bubble
from .programs import PaperSetup
from .row import Row, gpt, read, slug

_TRAINING = (
    "--mock-data",
    "--tokenizer-type NullTokenizer",
    "--train-iters 20",
    "--lr 6e-5",
    "--eval-iters 0",
    "--clip-grad 1.0",
    "--log-interval 1",
    "--log-throughput",
    "--manual-gc",
)
# The papers before Seq1F1B.
_OF_2021 = {"--bf16": "--fp16", "--position-embedding-type rope": "--position-embedding-type learned_absolute"}


@dataclass(frozen=True)
class Launch:
    """A run: its row of a table, the number of GPUs, and its flags, each with its values.

    `log` is the name of the log that tools/paper_tables.py reads back, without `.log`.
    """

    row: Row
    flags: tuple[str, ...]

    @property
    def gpus(self) -> int:
        return _setup(self.row).num_devices

    @property
    def log(self) -> str:
        return slug(self.row.label)


def seq1f1b() -> Iterator[Row]:
    """All that the authors ran: four models, three lengths each, four methods (seq1f1b_model_configs.csv).

    The figures of 2.7B, 13B and 30B were not obtained; nor was the number of micro-batches of 13B, which is that of 7B.
    """
    machine = read_machine("a100-seq1f1b")
    with_figures = {row.label: row for row in seq1f1b_tables.throughput()}
    for config in read("seq1f1b_model_configs"):
        if config["model"] not in seq1f1b_tables.MODELS:
            continue
        layers, hidden, heads, tensor, pipeline = seq1f1b_tables.MODELS[config["model"]]
        for length in map(int, config["seqlens"].split(";")):
            for microbatches in {"2.7B": (16, 32), "30B": (16,)}.get(config["model"], (8, 16)):
                for method in seq1f1b_tables.METHODS:
                    label = f"{config['model']}, {length} tokens, {microbatches} micro-batches, {method}"
                    if label in with_figures:
                        yield with_figures[label]
                        continue
                    yield Row(
                        table="Seq1F1B, all models",
                        label=label,
                        unit="tokens/s",
                        published=None,
                        setup=seq1f1b_tables.setup_of(
                            gpt(layers, hidden, heads, 32768), length, microbatches, tensor, pipeline, method
                        ),
                        machine=machine,
                    )


def terapipe() -> Iterator[Row]:
    """The ten settings of table 1, whole and cut into four; training finds the best number of slices itself."""
    machine = read_machine("v100-p3")
    for setting in read("terapipe_settings"):
        length = int(setting["seqlen"])
        for name, slices in (("w/o TeraPipe", (length,)), ("w/ TeraPipe", (length // 4,) * 4)):
            label = f"setting {setting['setting']}, {setting['model']}, {name}"
            setup = terapipe_tables.setup_of(setting, slices)
            yield Row(
                table="TeraPipe, ten settings",
                label=label,
                unit="s",
                published=None,
                group=f"setting {setting['setting']}",
                setup=setup,
                machine=machine,
            )


def recomputation() -> Iterator[Row]:
    yield from megatron_tables.recomputation()
    yield from megatron_tables.further_recomputation()


# Name of a launcher in scripts/paper -> its rows.
TABLES: Mapping[str, Callable[[], Iterable[Row]]] = MappingProxyType(
    {
        "seq1f1b": seq1f1b,
        "seq1f1b_7b": seq1f1b_tables.throughput,
        "seq1f1b_memory": seq1f1b_tables.memory,
        "terapipe": terapipe,
        "megatron_sc21": megatron_tables.sc21,
        "megatron_recompute": recomputation,
        "zero_bubble": zero_bubble.bubble_rates,
    }
)

# Why a row of a launcher has no published figure.
WITHOUT_FIGURE: Mapping[str, str] = MappingProxyType(
    {
        "seq1f1b": "figures of 2.7B, 13B and 30B could not be obtained, and the source of one of 7B contradicts itself",
        "terapipe": "docs/paper_tables.md compares the settings whose times are published",
    }
)


def launches(table: str) -> list[Launch]:
    """The launches of a table, in its order. Raises ValueError for a table that is not in TABLES."""
    if table not in TABLES:
        raise ValueError(f"there is no table {table}; there are {', '.join(TABLES)}")
    # No flag gives `auto` twice the memory of 1F1B.
    rows = [row for row in TABLES[table]() if not row.label.endswith("ZB-2p")]
    return [Launch(row, tuple(_flags(table, row))) for row in rows]


def step_of(launch: Launch) -> Prediction:
    """The predicted step of a run."""
    row = launch.row
    if row.step is not None:
        return row.step
    assert row.machine is not None
    return predict(_setup(row), row.machine)


def _setup(row: Row) -> PaperSetup:
    assert row.setup is not None
    return row.setup


def _flags(table: str, row: Row) -> Iterator[str]:
    setup = _setup(row)
    for flag in (*_sizes(setup), *decided_flags(Candidate(setup, _strategy(table)))):
        name = flag.split()[0]
        if (
            (setup.dropout and name in ("--hidden-dropout", "--attention-dropout"))  # Megatron's default of 0.1
            or (setup.tied_embeddings and name == "--untie-embeddings-and-output-weights")
            or (not setup.distributed_optimizer and name == "--use-distributed-optimizer")
            or (table == "terapipe" and name == "--sequence-splits")
        ):
            continue
        if not table.startswith("seq1f1b"):
            flag = _OF_2021.get(flag, flag)
        yield flag
    if setup.pipeline_before_data:
        yield "--use-tp-pp-dp-mapping"
    if setup.recompute == "core_attn":
        yield "--recompute-granularity selective"
    yield f"--vocab-size {setup.model.vocab_size or 1024}"
    yield from _TRAINING


def _sizes(setup: PaperSetup) -> Iterator[str]:
    """The GPTs of the papers."""
    model = setup.model
    yield f"--num-layers {model.num_layers}"
    yield f"--hidden-size {model.hidden_size}"
    yield f"--ffn-hidden-size {model.ffn_hidden_size}"
    yield f"--num-attention-heads {model.num_heads}"
    yield f"--kv-channels {model.head_dim}"
    yield from training_flags(setup.sequence_length)


def _strategy(table: str) -> str:
    return "terapipe" if table == "terapipe" else "uniform_comp"
