"""Bad input of a training: for each fault one sentence on rank 0, exit code 2, and no traceback but in a file."""

import argparse
import os
import shutil
import struct

import pytest

from megatron.seq1f1b.arguments.supported import UNSUPPORTED
from support.launch import PRETRAIN, ROOT, TINY_GPT

SPLIT = "--sequence-splits 2 "
MOCK = "--mock-data "

# Flags after those of a tiny GPT, and words of the sentence; {} is a folder of files. The world has one rank unless a
# case starts with "ranks=2 "; what starts with "hybrid " is for pretrain_hybrid.py.
BAD = {
    "ours": [
        (MOCK + "--sequence-splits 0", "--sequence-splits 0 must be at least 1"),
        (MOCK + "--sequence-splits -3", "--sequence-splits -3 must be at least 1"),
        (MOCK + "--sequence-splits 65", "use at most 64 segments"),
        (
            MOCK + "--sequence-splits x",
            "'x' is neither a number of segments nor 'auto'",
        ),
        (MOCK + "--sequence-splitz 4", "did you mean --sequence-splits?"),
        (MOCK + "--pipeline-schedule 2f2b", "invalid choice: '2f2b'"),
        (MOCK + SPLIT + "--sequence-split-strategy odd", "invalid choice: 'odd'"),
        (MOCK + SPLIT + "--sequence-split-strategy profile", "needs --sequence-split-profile"),
        (MOCK + SPLIT + "--sequence-split-file none", "none"),
        (MOCK + SPLIT + "--sequence-split-file {}", "{}"),
        (MOCK + SPLIT + "--sequence-split-file {}/three", "holds 3 segments, not --sequence-splits 2"),
        (MOCK + "--sequence-split-file {}/sixty", "add up to 60, not to --seq-length 64"),
        (MOCK + "--sequence-split-file {}/words", "words"),
        (
            MOCK + "--sequence-split-strategy profile --sequence-split-profile none.json --sequence-splits 2",
            "none.json",
        ),
        (MOCK + "--sequence-split-strategy profile --sequence-split-profile {}/words --sequence-splits 2", "words"),
        (MOCK + "--pipeline-schedule-file none.csv", "none.csv"),
        (MOCK + "--pipeline-schedule-file {}", "{}"),
        (MOCK + "--pipeline-schedule-file {}/words", "words"),
        (MOCK + "--device tpu", "invalid choice: 'tpu'"),
        (MOCK + SPLIT + "--pipeline-trace-iterations 0 --pipeline-trace {}/t", "--pipeline-trace-iterations 0"),
        (MOCK + SPLIT + "--pipeline-trace-iterations -3 --pipeline-trace {}/t", "--pipeline-trace-iterations -3"),
        (MOCK + SPLIT + "--pipeline-trace-iterations 9 --pipeline-trace {}/t", "beyond --train-iters 5"),
        (
            MOCK + SPLIT + "--exit-interval 2 --pipeline-trace {}/t",
            "3 is beyond --exit-interval 2; choose earlier ones",
        ),
        (MOCK + "--device-memory -1", "argument --device-memory: '-1' is not a size above 0"),
        (MOCK + "--device-memory nan", "argument --device-memory: 'nan' is not a size above 0"),
        (MOCK + "--dry-run-output {}/new", "--dry-run-output needs --dry-run"),
        (MOCK + "--dry-run --dry-run-output /proc/none", "--dry-run-output /proc/none cannot be written"),
        (MOCK + "--sequence-splits 1000000000", "use at most 64 segments"),
        (MOCK + "--sequence-split-file {}/negative", "must hold the lengths of the segments in tokens, positive"),
    ],
    "numbers that cannot be meant": [
        (
            MOCK + "--group-query-attention --num-query-groups 3",
            "running a step failed: shape '[64, 2, 3, 48]' is invalid for input of size",
        ),
        (
            MOCK + "--group-query-attention --num-query-groups 8",
            "running a step failed: shape '[64, 2, 8, 32]' is invalid for input of size",
        ),
        (MOCK + "--kv-channels 0", "building the model failed: float division by zero"),
        (MOCK + "--num-experts 4 --moe-router-topk 9", "running a step failed: selected index k out of range"),
        (MOCK + "--num-experts 4 --moe-aux-loss-coeff nan", "--moe-aux-loss-coeff nan must be a number"),
        (
            MOCK + "--attention-dropout 2",
            "building the model failed: dropout probability has to be between 0 and 1, but",
        ),
        (MOCK + "--hidden-dropout -1", "building the model failed: dropout probability has to be between 0 and 1, but"),
        (MOCK + "--init-method-std -1", "building the model failed: normal expects std >= 0.0, but found std -1"),
        (MOCK + "--norm-epsilon nan", "--layernorm-epsilon nan must be a number"),
        (MOCK + "--position-embedding-type rope --rotary-percent 0", "--rotary-percent 0.0 must be above 0"),
        (
            MOCK + "--make-vocab-size-divisible-by 0",
            "loading the tokenizer of --tokenizer-type NullTokenizer failed: division by",
        ),
        (MOCK + "--train-iters -3", "building the model failed: assert self.lr_decay_steps > 0 does not hold"),
        (
            MOCK + "--lr-warmup-fraction 2",
            "building the model failed: assert self.lr_warmup_steps < self.lr_decay_steps",
        ),
        (
            MOCK + "--lr-warmup-iters 100",
            "building the model failed: assert self.lr_warmup_steps < self.lr_decay_steps",
        ),
        (
            MOCK + "--lr-decay-iters 2 --lr-warmup-iters 3",
            "building the model failed: assert self.lr_warmup_steps < self.lr_decay_steps",
        ),
        (MOCK + "--lr-decay-style WSD", "building the model failed: assert self.wsd_decay_steps is not None does not"),
        (MOCK + "--weight-decay nan", "--weight-decay nan must be a number"),
        (MOCK + "--adam-beta1 2", "building the model failed: Invalid beta parameter at index 0: 2.0"),
        (MOCK + "--eval-iters 5 --eval-interval 0", "reading the data failed: integer division or modulo by zero"),
        (MOCK + "--seed -1", "Seed (-1) should be a positive integer"),
        (MOCK + "--num-workers -1", "reading the data failed: num_workers option should be non-negative; use"),
        (MOCK + "--fp16 --initial-loss-scale 0", "building the model failed: assert initial_scale > 0.0 does not hold"),
        (
            MOCK + "--distributed-timeout-minutes 0",
            "connecting the ranks failed: The client socket has timed out after 0ms while",
        ),
        (MOCK + "--tensor-model-parallel-size -1", "number of microbatches should be at least 1, got -4"),
        (MOCK + "--pipeline-model-parallel-size 0", "checking the flags failed: integer modulo by zero"),
        (
            MOCK + "--expert-model-parallel-size 0 --num-experts 4",
            "connecting the ranks failed: integer division or modulo by zero",
        ),
        (
            "ranks=2 " + MOCK + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            "building the model failed: num_layers_per_pipeline_rank 2 should be divisible",
        ),
        (
            "ranks=2 " + MOCK + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 9",
            "--decoder-first-pipeline-num-layers 9 must be at most --num-layers 4",
        ),
        (
            "ranks=2 " + MOCK + "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63",
            "running a step failed: First dimension of the tensor should be divisible by",
        ),
        (MOCK + "--seq-length -1", "Trying to create tensor with negative dimension -1: [-1, 2, 256]"),
        (
            "hybrid " + MOCK + "--hybrid-layer-pattern M*M* --mamba-num-heads 3",
            "building the model failed: nheads must be evenly divisible by ngroups when",
        ),
        (
            "hybrid " + MOCK + "--hybrid-layer-pattern M*M* --mamba-state-dim 0",
            "building the model failed: when instantiating MambaMixer when instantiating",
        ),
        (MOCK + "--ckpt-step 5", "--ckpt-step 5 needs --load"),
        (MOCK + "--use-checkpoint-args", "--use-checkpoint-args requires --load or --pretrained-checkpoint argument"),
        (MOCK + "--wandb-project x", "expected str, bytes or os.PathLike object, not NoneType"),
    ],
    "what is unsupported, whatever else Megatron would find": [
        (MOCK + SPLIT + "--qk-clip", "--qk-clip needs the largest logit of each head"),
        (MOCK + SPLIT + "--log-max-attention-logit", "--log-max-attention-logit needs the largest logit of each head"),
        (MOCK + SPLIT + "--use-megatron-fsdp", "--use-megatron-fsdp is not tested"),
        (MOCK + SPLIT + "--use-torch-fsdp2", "--use-torch-fsdp2 is not tested"),
        (MOCK + SPLIT + "--hybrid-context-parallel", "--hybrid-context-parallel follows"),
        (MOCK + SPLIT + "--delay-wgrad-compute", "--delay-wgrad-compute follows"),
        (MOCK + SPLIT + "--fine-grained-activation-offloading", "--fine-grained-activation-offloading follows"),
        (MOCK + SPLIT + "--moe-expert-capacity-factor 1", "--moe-expert-capacity-factor makes"),
        (MOCK + SPLIT + "--tp-comm-overlap", "--tp-comm-overlap sizes its buffers for whole sequences"),
        (MOCK + SPLIT + "--window-size 4", "--window-size with tokens after the query"),
    ],
    "Megatron's own checks": [
        (MOCK + "--num-layers 0", "float division by zero"),
        (MOCK + "--hidden-size 0", "building the model failed: float division by zero"),
        (MOCK + "--log-interval 0", "integer modulo by zero"),
        (
            MOCK + "--num-layers 5 --num-layers-per-virtual-pipeline-stage 2",
            "checking the flags failed: number of layers per pipeline stage must be",
        ),
        (
            "ranks=2 " + MOCK + "--num-layers 5 --pipeline-model-parallel-size 2",
            "checking the flags failed: Number of layers should be divisible by the",
        ),
        ("ranks=2 " + MOCK + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "virtual"),
        ("ranks=2 " + MOCK + "--pipeline-model-parallel-size 3", "world size (2) is not divisible"),
        (MOCK + "--tensor-model-parallel-size 2", "world size (1) is not divisible"),
        (MOCK + "--global-batch-size 0", "--global-batch-size 0"),
        (MOCK + "--global-batch-size 3", "must be divisible"),
        (MOCK + "--micro-batch-size 0", "--micro-batch-size 0"),
        (MOCK + "--seq-length 128", "max_position_embeddings (64)"),
        (MOCK + "--hidden-size 65", "--hidden-size 65, --num-attention-heads 4"),
        (MOCK + "--lr -1", "--lr -1"),
        (MOCK + "--bf16 --fp16", "--bf16"),
        (MOCK + "--yaml-cfg none.yaml", "none.yaml: No such file or directory"),
        (MOCK + "--no-such-flag", "unrecognized arguments: --no-such-flag"),
        (MOCK + "--num-layers many", "argument --num-layers: invalid int value: 'many'"),
    ],
    "data, tokenizers": [
        ("--data-path {}/none", "reading the data failed: One or both of the .idx and .bin files cannot be"),
        (
            "--data-path 0.5 {}/data 0.5 {}/none",
            "reading the data failed: One or both of the .idx and .bin files cannot be",
        ),
        (
            "--train-data-path {}/none --valid-data-path {}/data --test-data-path {}/data",
            "reading the data failed: One or both of the .idx and .bin files cannot be",
        ),
        ("--data-path", "not enough values to unpack (expected 2, got 0)"),
        ("--data-path 0.5 {}/data 0.5", "reading the data failed: One or both of the .idx and .bin files cannot be"),
        (
            "--data-path 0 {}/data 0 {}/data",
            "reading the data failed: assert numpy.isclose(sum(normalized_weights), 1.0)",
        ),
        ("--data-args-path {}/none", "{}/none: No such file or directory"),
        ("--per-split-data-args-path {}/words", "Expecting value: line 1 column 1 (char 0)"),
        ("--data-path {}/data --split a,b,c", "reading the data failed: cannot convert float NaN to integer"),
        ("--data-path {}/data --split 0,0,1", "reading the data failed: no sample to consume: 0"),
        (
            "--data-path {}/negative_lengths",
            "running a step failed: offset must be non-negative and no greater than buffer",
        ),
        ("--data-path {}/data.bin", "reading the data failed: One or both of the .idx and .bin files cannot be"),
        ("--data-path {}/text", "reading the data failed: bad header, cannot read: {}/text.idx"),
        ("--data-path {}/short_index", "reading the data failed: buffer is smaller than requested size"),
        ("--data-path {}/short_data", "running a step failed: buffer is smaller than requested size"),
        (
            MOCK + "--tokenizer-type HuggingFaceTokenizer",
            "loading the tokenizer of --tokenizer-type HuggingFaceTokenizer failed:",
        ),
        (
            MOCK + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/none",
            "loading the tokenizer of --tokenizer-type HuggingFaceTokenizer failed: Unable",
        ),
        (
            MOCK + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/broken",
            "loading the tokenizer of --tokenizer-type HuggingFaceTokenizer failed: Unable",
        ),
        (
            MOCK + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/trained",
            "loading the tokenizer of --tokenizer-type HuggingFaceTokenizer failed: Unable",
        ),
        (
            MOCK + "--tokenizer-type SentencePieceTokenizer --tokenizer-model {}/none",
            "loading the tokenizer of --tokenizer-type SentencePieceTokenizer failed:",
        ),
        (
            MOCK + "--tokenizer-type GPT2BPETokenizer --vocab-file {}/none",
            "loading the tokenizer of --tokenizer-type GPT2BPETokenizer failed: wget",
        ),
    ],
    "checkpoints": [
        (
            MOCK + "--load {}/none --exit-on-missing-checkpoint",
            "what it printed last is the reason",
        ),
        (
            MOCK + "--load {}/words_for_a_number",
            "what it printed last is the reason",
        ),
        (MOCK + "--load {}/gone", "loading the checkpoint in {}/gone failed: {}/gone/iter_0000007: No such file"),
        (MOCK + "--load {}/garbage", "loading the checkpoint in {}/garbage failed: Expecting value: line 1 column 1"),
        (MOCK + "--load {}/words", "words"),
        (
            MOCK + "--load {}/trained --hidden-size 32",
            "loading the checkpoint in {}/trained failed: CheckpointingException: Global",
        ),
        (
            MOCK + "--load {}/trained --num-layers 8",
            "loading the checkpoint in {}/trained failed: CheckpointingException: Global",
        ),
        (MOCK + "--load {}/cut_short", "loading the checkpoint in {}/cut_short failed: CheckpointException: EOFError"),
        (
            MOCK + "--load {}/without_optimizer",
            "loading the checkpoint in {}/without_optimizer failed: KeyError: 'optimizer'",
        ),
        (MOCK + "--load {}/zeroed", "loading the checkpoint in {}/zeroed failed: UnpicklingError: invalid"),
        ("--data-path {}", "reading the data failed: One or both of the .idx and .bin files cannot be"),
        (
            "hybrid " + MOCK + "--hybrid-layer-pattern M*M*",
            "building the model failed: nheads must be evenly divisible by ngroups when",
        ),
        (MOCK + "--ffn-hidden-size 10000000000", "can't allocate memory"),
        (SPLIT + "--sft --data-path {}/chats.jsonl", "datasets"),
        (
            MOCK + "--kv-channels 15 --position-embedding-type rope",
            "running a step failed: The size of tensor a (15) must match the size of",
        ),
        (MOCK + "--seed 4294967296", "Seed must be between 0 and 2**32 - 1"),
    ],
    "places": [
        (MOCK + "--save {}/words/below --save-interval 2", "--save {}/words/below cannot be written"),
        (MOCK + "--save /proc/none --save-interval 2", "--save /proc/none cannot be written"),
        (MOCK + "--tensorboard-dir /proc/none", "/proc/none: No such file or directory"),
        (MOCK + SPLIT + "--pipeline-trace /proc/none", "--pipeline-trace /proc/none cannot be written"),
        (MOCK + "--data-cache-path /proc/none", "/proc/none"),
    ],
    "what a script finds": [
        ("", "there are no data; give --data-path, or --mock-data"),
        (
            MOCK + "--tokenizer-type TikTokenizer --tokenizer-model {}/words",
            "loading the tokenizer of --tokenizer-type TikTokenizer failed: assert",
        ),
        (MOCK + "--hybrid-layer-pattern *-*-", "--hybrid-layer-pattern makes a hybrid model"),
        ("hybrid " + MOCK, "pretrain_hybrid.py needs --hybrid-layer-pattern"),
        ("--data-path {}/beyond", "the data hold the token 204, but the vocabulary ends at 127; give the"),
    ],
}
# Of each kind so many cases run with every run of the tests.
_USUAL = 3
CASES = [
    pytest.param(*row, id=row[0][:58], marks=[] if number < _USUAL else pytest.mark.exhaustive)
    for rows in BAD.values()
    for number, row in enumerate(rows)
]
GOOD = [MOCK + SPLIT, MOCK + "--load {}/none", MOCK + SPLIT + "--save {}/new --save-interval 2"]
CHANGED = {
    MOCK + "--distributed-backend nccl": "--distributed-backend nccl becomes gloo on the CPU",
    MOCK + SPLIT + "--flash-attention-version 4": "--flash-attention-version has no effect on the CPU",
    MOCK
    + "--pipeline-schedule gpipe --pipeline-schedule-file {}/four.csv": "takes the place of --pipeline-schedule gpipe",
    MOCK
    + SPLIT
    + "--sequence-split-strategy even --sequence-split-profile {}/none": "--sequence-split-profile has no effect",
}


@pytest.fixture(scope="module")
def folder(launch, tmp_path_factory):
    """Files of every kind, and a checkpoint in the folder `trained`."""
    folder = tmp_path_factory.mktemp("files")
    saved = [MOCK.strip(), "--train-iters", "1", "--save", folder / "trained", "--save-interval", "1"]
    launch(1, [*TINY_GPT, *saved]).check()
    saved[saved.index("--save") + 1] = folder / "without_optimizer"
    launch(1, [*TINY_GPT, *saved, "--no-save-optim"]).check()
    for name in ("cut_short", "zeroed", "without_metadata"):
        shutil.copytree(folder / "trained", folder / name)
        longest = max((folder / name / "iter_0000001").glob("*.distcp"), key=lambda path: path.stat().st_size)
        if name == "cut_short":
            os.truncate(longest, longest.stat().st_size // 2)
        elif name == "zeroed":
            longest.write_bytes(bytes(longest.stat().st_size))
    (folder / "without_metadata" / "iter_0000001" / ".metadata").unlink()
    (folder / "chats.jsonl").write_text("{}")
    (folder / "three").write_text("20 20 24")
    (folder / "sixty").write_text("30 30")
    (folder / "words").write_text("many small words")
    (folder / "negative").write_text("-10 74")
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text('{"version": "1.0", "model"')
    (folder / "four.csv").write_text(",".join(f"0F{m},0B{m}" for m in range(4)))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 5, 0, 6, 0, 1, 2)
    for name, idx, data in (
        ("data", index, bytes(16)),
        ("text", b"text " * 20, bytes(16)),
        ("short_index", index[:60], bytes(16)),
        ("short_data", index, bytes(10)),
        (
            "negative_lengths",
            index.replace(struct.pack("<2i2q", 3, 5, 0, 6), struct.pack("<2i2q", -3, 11, 0, -6)),
            bytes(16),
        ),
        ("beyond", index, struct.pack("<8H", *range(197, 205))),
    ):
        (folder / f"{name}.idx").write_bytes(idx)
        (folder / f"{name}.bin").write_bytes(data)
    for name, number in (("words_for_a_number", "three"), ("gone", "7"), ("half", "4"), ("garbage", "4")):
        (folder / name / "iter_0000002").mkdir(parents=True)
        (folder / name / "latest_checkpointed_iteration.txt").write_text(number)
    for name in ("half", "garbage"):
        (folder / name / "iter_0000004").mkdir()
        (folder / name / "iter_0000004" / ".metadata").write_text("garbage")
    for name in ("metadata.json", "common.pt"):
        (folder / "garbage" / "iter_0000004" / name).write_text("garbage")
    return folder


@pytest.fixture
def start(launch, folder):
    """Starts a training script with flags as in the tables."""

    def start(flags, **options):
        script = ROOT / "pretrain_hybrid.py" if flags.startswith("hybrid ") else PRETRAIN
        ranks = 2 if flags.startswith("ranks=2 ") else 1
        words = flags.removeprefix("ranks=2 ").removeprefix("hybrid ").replace("{}", str(folder)).split()
        return launch(ranks, [*TINY_GPT, *words], script, **options)

    return start


@pytest.mark.parametrize("flags, sentence", CASES)
def test_one_sentence(start, folder, flags, sentence):
    job = start(flags)
    (printed,) = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert job.code == 2 and "Traceback (most" not in job.log, job.log[-2000:]
    assert sentence.replace("{}", str(folder)) in printed and printed.endswith((".", "?"))


@pytest.mark.parametrize("name", ["half", "without_metadata"])
def test_a_checkpoint_without_metadata_ends_with_one_sentence(start, folder, name):
    """torch logs a traceback before."""
    job = start(f"{MOCK}--load {folder / name}")
    last = job.log.splitlines()[-1]
    assert job.code == 2 and last.startswith(f"error: loading the checkpoint in {folder / name} failed: "), last


@pytest.mark.parametrize("flags", GOOD)
def test_what_is_right_is_not_refused(start, flags):
    start(flags).check()


@pytest.mark.parametrize("flags, sentence", CHANGED.items(), ids=[*CHANGED])
def test_what_is_changed_is_told(start, flags, sentence):
    assert sentence in start(flags).check().log


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ({"RANK": "7"}, "RANK=7 in the environment must be below WORLD_SIZE=1"),
        ({"MASTER_PORT": "many"}, "connecting the ranks failed: invalid literal for int() with base 10: 'many'"),
    ],
    ids=["rank", "port"],
)
def test_a_wrong_environment_is_one_sentence(start, variables, sentence):
    job = start(MOCK, env=variables)
    assert job.code == 2 and f"error: {sentence}" in job.log.splitlines()[-1], job.log[-2000:]


def test_every_flag_of_the_table_is_one_of_megatrons():
    from megatron.training.arguments import add_megatron_arguments

    known = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions
    for rows in UNSUPPORTED.values():
        for row in rows:
            for word in row.feature.split():
                assert not word.startswith("--") or word in known, row.feature
