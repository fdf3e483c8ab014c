"""Bad input of a training: for each fault one sentence, exit code 2, no traceback, and nothing but the sentence after
Megatron's few lines on sizes. All starts share a process."""

import argparse
import json
import os
import shutil
import struct

import pytest

from megatron.seq1f1b.arguments.supported import UNSUPPORTED
from megatron.seq1f1b.startup.values import LIMITS, SIGNED, UNLIMITED
from support.launch import ROOT, TINY_GPT

SPLIT = "--sequence-splits 2 "
MOCK = "--mock-data "

# Flags after those of a tiny GPT; {} is a folder of files. The world has one rank unless a case starts with "ranks=2 ";
# what starts with "hybrid " is for pretrain_hybrid.py.
BAD = [
    # ours
    (MOCK + "--sequence-splits 0", "--sequence-splits 0 must be at least 1"),
    (MOCK + "--sequence-splits -3", "--sequence-splits -3 must be at least 1"),
    (MOCK + "--sequence-splits 65", "use at most 64 segments"),
    (
        MOCK + "--sequence-splits x",
        "argument --sequence-splits/--pipe-sp-splits: 'x' is neither a number of segments nor 'auto'",
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
    (MOCK + "--sequence-split-strategy profile --sequence-split-profile none.json " + SPLIT, "none.json"),
    (MOCK + "--sequence-split-strategy profile --sequence-split-profile {}/words " + SPLIT, "words"),
    (MOCK + "--pipeline-schedule-file none.csv", "none.csv"),
    (MOCK + "--pipeline-schedule-file {}", "{}"),
    (MOCK + "--pipeline-schedule-file {}/words", "words"),
    (MOCK + "--device tpu", "invalid choice: 'tpu'"),
    (MOCK + SPLIT + "--pipeline-trace-iterations 0 --pipeline-trace {}/t", "--pipeline-trace-iterations 0"),
    (MOCK + SPLIT + "--pipeline-trace-iterations -3 --pipeline-trace {}/t", "--pipeline-trace-iterations -3"),
    (MOCK + SPLIT + "--pipeline-trace-iterations 9 --pipeline-trace {}/t", "beyond --train-iters 5"),
    (MOCK + SPLIT + "--exit-interval 2 --pipeline-trace {}/t", "3 is beyond --exit-interval 2; choose earlier ones"),
    (MOCK + "--device-memory -1", "argument --device-memory: '-1' is not a size above 0"),
    (MOCK + "--device-memory nan", "argument --device-memory: 'nan' is not a size above 0"),
    (MOCK + "--dry-run-output {}/new", "--dry-run-output needs --dry-run"),
    (MOCK + "--dry-run --dry-run-output /proc/none", "--dry-run-output /proc/none cannot be written"),
    (MOCK + "--sequence-splits 1000000000", "use at most 64 segments"),
    (MOCK + "--sequence-split-file {}/negative", "must hold the lengths of the segments in tokens, positive"),
    # numbers that cannot be meant
    (MOCK + "--group-query-attention --num-query-groups 3", "--num-query-groups 3 must divide --num-attention-heads 4"),
    (MOCK + "--group-query-attention --num-query-groups 8", "--num-query-groups 8 must divide"),
    (MOCK + "--kv-channels 0", "--kv-channels 0 must be at least 1"),
    (MOCK + "--num-experts 4 --moe-router-topk 9", "--moe-router-topk 9 must be at most --num-experts 4"),
    (MOCK + "--num-experts 4 --moe-aux-loss-coeff nan", "--moe-aux-loss-coeff nan must be a finite number"),
    (MOCK + "--attention-dropout 2", "--attention-dropout 2.0 must be at least 0 and below 1"),
    (MOCK + "--hidden-dropout -1", "--hidden-dropout -1.0 must be at least 0"),
    (MOCK + "--init-method-std -1", "--init-method-std -1.0 must be at least 0"),
    (MOCK + "--norm-epsilon nan", "--norm-epsilon nan must be a finite number"),
    (MOCK + "--position-embedding-type rope --rotary-percent 0", "--rotary-percent 0.0 must be above 0"),
    (MOCK + "--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0 must be at least 1"),
    (MOCK + "--train-iters -3", "--train-iters -3 must be at least 0"),
    (MOCK + "--rampup-batch-size 0 0 0", "--rampup-batch-size 0 must be at least 1"),
    (MOCK + "--lr inf", "--lr inf must be a finite number"),
    (MOCK + "--lr-warmup-fraction 2", "--lr-warmup-fraction 2.0 must be between 0 and 1"),
    (MOCK + "--lr-warmup-iters 100", "--lr-warmup-iters 100 must be below --train-iters 5"),
    (MOCK + "--lr-decay-iters 2 --lr-warmup-iters 3", "--lr-warmup-iters 3 must be below --lr-decay-iters 2"),
    (MOCK + "--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    (MOCK + "--weight-decay nan", "--weight-decay nan must be a finite number"),
    (MOCK + "--adam-beta1 2", "--adam-beta1 2.0 must be at least 0 and below 1"),
    (MOCK + "--eval-iters 5 --eval-interval 0", "--eval-interval 0 must be at least 1"),
    (MOCK + "--save-interval -2", "--save-interval -2 must be at least 1"),
    (MOCK + "--seed -1", "--seed -1 must be at least 1"),
    (MOCK + "--num-workers -1", "--num-workers -1 must be at least 0"),
    (MOCK + "--fp16 --initial-loss-scale 0", "--initial-loss-scale 0.0 must be above 0"),
    (MOCK + "--distributed-timeout-minutes 0", "--distributed-timeout-minutes 0 must be at least 1"),
    (MOCK + "--tensor-model-parallel-size -1", "--tensor-model-parallel-size -1 must be at least 1"),
    (MOCK + "--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size 0 must be at least 1"),
    (MOCK + "--expert-model-parallel-size 0 --num-experts 4", "--expert-model-parallel-size 0 must be at least 1"),
    (
        "ranks=2 " + MOCK + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        "--num-layers 4 does not fill --num-virtual-stages-per-pipeline-rank 3",
    ),
    (
        "ranks=2 " + MOCK + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 9",
        "--decoder-first-pipeline-num-layers 9 must be at most --num-layers 4",
    ),
    (
        "ranks=2 " + MOCK + "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63",
        "--tensor-model-parallel-size 2 must divide --seq-length 63",
    ),
    (MOCK + "--seq-length -1", "--seq-length -1 must be at least 1"),
    (MOCK + "--multi-latent-attention --kv-lora-rank 0", "--kv-lora-rank 0 must be at least 1"),
    ("hybrid " + MOCK + "--hybrid-layer-pattern M*M* --mamba-num-heads 3", "--mamba-num-groups 8 must divide"),
    ("hybrid " + MOCK + "--hybrid-layer-pattern M*M* --mamba-state-dim 0", "--mamba-state-dim 0 must be at least 1"),
    (MOCK + "--ckpt-step 5", "--ckpt-step 5 needs --load"),
    (MOCK + "--use-checkpoint-args", "--use-checkpoint-args needs --load or --pretrained-checkpoint"),
    (MOCK + "--wandb-project x", "--wandb-project needs --wandb-exp-name"),
    # what is unsupported, whatever else Megatron would find
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
    # Megatron's own checks
    (MOCK + "--num-layers 0", "--num-layers 0 must be at least 1"),
    (MOCK + "--hidden-size 0", "--hidden-size 0 must be at least 1"),
    (MOCK + "--log-interval 0", "--log-interval 0 must be at least 1"),
    (MOCK + "--num-layers 5 --num-layers-per-virtual-pipeline-stage 2", "--num-layers"),
    ("ranks=2 " + MOCK + "--num-layers 5 --pipeline-model-parallel-size 2", "--num-layers 5"),
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
    (MOCK + "--yaml-cfg none.yaml", "No such file or directory: 'none.yaml'"),
    (MOCK + "--no-such-flag", "unrecognized arguments: --no-such-flag"),
    (MOCK + "--num-layers many", "argument --num-layers: invalid int value: 'many'"),
    # data, tokenizers
    ("--data-path {}/none", "there is no file {}/none.idx"),
    ("--data-path 0.5 {}/data 0.5 {}/none", "there is no file {}/none.idx"),
    ("--train-data-path {}/none --valid-data-path {}/data --test-data-path {}/data", "--train-data-path {}/none"),
    ("--data-path", "--data-path names no data"),
    ("--data-path 0.5 {}/data 0.5", "must be names, or pairs of weight and name throughout"),
    ("--data-path 0 {}/data 0 {}/data", "weights must be finite, not negative, and not all 0"),
    ("--data-args-path {}/none", "--data-args-path {}/none cannot be read (No such file or directory)"),
    ("--per-split-data-args-path {}/words", "--per-split-data-args-path {}/words must hold JSON such as"),
    ("--data-path {}/data --split a,b,c", "--split a,b,c must hold the shares of training, validation and test"),
    ("--data-path {}/data --split 0,0,1", "--split 0,0,1 leaves no data for training"),
    ("--data-path {}/negative_lengths", "holds lengths, positions or documents that do not follow one another"),
    ("--data-path {}/data.bin", "give the name without .bin"),
    ("--data-path {}/text", "is not an index of Megatron's"),
    ("--data-path {}/short_index", "has 60 bytes, but its 2 sequences"),
    ("--data-path {}/short_data", "has 10 bytes, but its index stands for 16"),
    (MOCK + "--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model"),
    (MOCK + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/none", "{}/none does not exist"),
    (MOCK + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/broken", "tokenizer.json is broken"),
    (MOCK + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/trained", "{}/trained holds no tokenizer"),
    (MOCK + "--tokenizer-type SentencePieceTokenizer --tokenizer-model {}/none", "{}/none does not exist"),
    (MOCK + "--tokenizer-type GPT2BPETokenizer --vocab-file {}/none", "--vocab-file {}/none does not exist"),
    # checkpoints
    (MOCK + "--load {}/none --exit-on-missing-checkpoint", "holds no checkpoint"),
    (MOCK + "--load {}/words_for_a_number", "holds 'three', not the number of an iteration"),
    (MOCK + "--load {}/gone", "there is no iter_0000007"),
    (MOCK + "--load {}/half", "iter_0000004 has no file metadata.json; for an earlier one put 2 into"),
    (MOCK + "--load {}/garbage", "cannot be read"),
    (MOCK + "--load {}/words", "words"),
    (MOCK + "--load {}/trained --hidden-size 32", "of another model, with --hidden-size 64 instead of 32"),
    (MOCK + "--load {}/trained --num-layers 8", "of another model, with --num-layers 4 instead of 8"),
    (MOCK + "--load {}/cut_short", "the checkpoint was not saved to its end; there is no earlier one"),
    (MOCK + "--load {}/without_metadata", "iter_0000001 has no file .metadata; there is no earlier one"),
    # places
    (MOCK + "--save {}/words/below --save-interval 2", "--save {}/words/below cannot be written"),
    (MOCK + "--save /proc/none --save-interval 2", "--save /proc/none cannot be written"),
    (MOCK + "--tensorboard-dir /proc/none", "--tensorboard-dir /proc/none cannot be written"),
    (MOCK + "--data-cache-path /proc/none", "--data-cache-path /proc/none cannot be written"),
    (MOCK + SPLIT + "--pipeline-trace /proc/none", "--pipeline-trace /proc/none cannot be written"),
]
# Found when Megatron has printed its arguments: what a script checks by itself, what needs the tokenizer.
LATE = [
    ("", "there are no data; give --data-path, or --mock-data"),
    (
        MOCK + "--tokenizer-type TikTokenizer --tokenizer-model {}/words",
        "the tokenizer cannot be loaded (--tokenizer-t",
    ),
    (MOCK + "--hybrid-layer-pattern *-*-", "--hybrid-layer-pattern makes a hybrid model"),
    ("hybrid " + MOCK, "pretrain_hybrid.py needs --hybrid-layer-pattern"),
    ("--data-path {}/beyond", "holds tokens from 197 to 204, but the vocabulary ends at 127; give the tokenizer"),
]
GOOD = [MOCK + SPLIT, MOCK + "--load {}/none", "--data-path {}/data", MOCK + SPLIT + "--save {}/new --save-interval 2"]
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
    for name in ("cut_short", "without_metadata"):
        shutil.copytree(folder / "trained", folder / name)
    longest = max((folder / "cut_short" / "iter_0000001").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(longest, longest.stat().st_size // 2)
    (folder / "without_metadata" / "iter_0000001" / ".metadata").unlink()
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


@pytest.fixture(scope="module")
def ended(launch, folder):
    """(exit code, what was printed) of every start, by its flags."""
    chosen = [flags for flags, _ in LATE + BAD] + GOOD + [*CHANGED]
    starts = []
    for flags in chosen:
        script = "hybrid" if flags.startswith("hybrid ") else "gpt"
        num_ranks = 2 if flags.startswith("ranks=2 ") else 1
        given = flags.removeprefix("ranks=2 ").removeprefix("hybrid ").replace("{}", str(folder))
        starts.append((script, num_ranks, [*TINY_GPT, *given.split()]))
    (folder / "starts.json").write_text(json.dumps(starts))
    script = ROOT / "tests" / "functional_tests" / "workers" / "start_worker.py"
    job = launch(1, [folder / "starts.json"], script, timeout=400, env={"PYTHONPATH": str(ROOT)}).check()
    assert (folder / "ended.json").exists(), job.log[-4000:]
    return dict(zip(chosen, json.loads((folder / "ended.json").read_text()), strict=True))


@pytest.mark.parametrize("flags, sentence", BAD, ids=lambda value: value[:70])
def test_one_sentence(ended, folder, flags, sentence):
    code, printed = ended[flags]
    lines = printed.splitlines()
    assert code == 2, printed[-2000:]
    assert lines[-1].startswith("error: ") and lines[-1].endswith(".")
    assert sentence.replace("{}", str(folder)) in lines[-1]
    assert "Traceback" not in printed and len(lines) < 20


@pytest.mark.parametrize("flags, sentence", LATE, ids=lambda value: value[:70])
def test_one_sentence_at_the_end(ended, folder, flags, sentence):
    code, printed = ended[flags]
    last = printed.splitlines()[-1]
    assert code == 2 and "Traceback" not in printed, printed[-2000:]
    assert last.startswith("error: ") and sentence in last


@pytest.mark.parametrize("flags", GOOD)
def test_what_is_right_is_not_refused(ended, flags):
    assert ended[flags][0] == 0, ended[flags][1][-2000:]


@pytest.mark.parametrize("flags, sentence", CHANGED.items(), ids=[*CHANGED])
def test_what_is_changed_is_told(ended, flags, sentence):
    code, printed = ended[flags]
    assert code == 0 and printed.count(sentence) == 1, printed[-2000:]


def test_a_token_beyond_the_vocabulary_ends_the_training(launch, tmp_path):
    """Start-up looks at pieces of large files only."""
    (tmp_path / "beyond.py").write_text(
        "from argparse import Namespace\nimport torch\nfrom pretrain_gpt import check_tokens\n"
        "args = Namespace(dry_run=False, padded_vocab_size=128)\n"
        "batch = {'tokens': torch.tensor([[3, 127]]), 'labels': torch.tensor([[127, 5]])}\n"
        "check_tokens(batch, args)\nbatch['labels'][0, 0] = 128\ncheck_tokens(batch, args)\n"
    )
    job = launch(1, script=tmp_path / "beyond.py")
    assert job.code == 2 and "error: the data hold the token 128, but the vocabulary ends at 127; give" in job.log


def test_torchrun_is_given_the_sentence(ended, folder):
    """The last refused start left it where torchrun's report finds it."""
    report = json.loads((folder / "error.json").read_text())["message"]
    assert ended[BAD[-1][0]][1].endswith(f"error: {report['message']}\n") and int(report["extraInfo"]["timestamp"]) > 0


def test_every_limit_is_on_a_number_of_megatrons():
    from megatron.training.arguments import add_megatron_arguments

    actions = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
    numbers = {action.dest for action in actions if action.type in (int, float)}
    limited = {name for limit in LIMITS for name in limit.names} | SIGNED | UNLIMITED
    assert limited - numbers == set()


def test_every_flag_of_the_table_is_one_of_megatrons():
    from megatron.training.arguments import add_megatron_arguments

    known = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions
    for rows in UNSUPPORTED.values():
        for row in rows:
            for word in row.feature.split():
                assert not word.startswith("--") or word in known, row.feature
