"""pretrain_gpt.py trains mixtures of experts, multi-latent attention and layouts on segments as Megatron's own schedule
does, and pretrain_hybrid.py hybrid models."""

import pytest

from support.launch import ROOT, TINY_GPT

EVALUATE = ("--eval-iters", "2", "--eval-interval", "3")
PIPELINE = (*TINY_GPT, *EVALUATE, "--mock-data", "--pipeline-model-parallel-size", "2")
SEGMENTS = ("--sequence-splits", "4", "--sequence-split-strategy", "balanced")

LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16", "--qk-head-dim", "8"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "8", "--qk-layernorm", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "none", "--rope-type", "yarn"),
)
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-shared-expert-intermediate-size", "32"),
    *("--moe-z-loss-coeff", "1e-2"),
)
BALANCED = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2")
BIASED = ("--moe-router-load-balancing-type", "none", "--moe-router-enable-expert-bias")
SIGMOID = ("--moe-router-score-function", "sigmoid")
# The embedding and the loss on stages of their own, and the two chunks between them not alike.
LAYOUT = ("--pipeline-model-parallel-layout", "E|t|ttt|L")
PREDICTION = (
    *("--mtp-num-layers", "2", "--untie-embeddings-and-output-weights"),
    *("--position-embedding-type", "rope"),
)
PREDICTION_FIRST = (*PREDICTION, "--pipeline-model-parallel-layout", "Ettttmm|L")

RECURRENT = (
    *("--hybrid-layer-pattern", "G-|*M", "--swiglu", "--disable-bias-linear"),
    *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
    *("--linear-key-head-dim", "16", "--linear-value-head-dim", "16"),
    *("--mamba-num-heads", "8", "--mamba-head-dim", "16", "--mamba-num-groups", "2", "--mamba-state-dim", "16"),
)


@pytest.mark.parametrize(
    "ranks, model",
    [
        (2, LATENT),
        (2, (*EXPERTS, *BIASED, *SIGMOID)),
        (4, (*EXPERTS, *BALANCED, "--expert-model-parallel-size", "2", "--use-distributed-optimizer")),
        (2, LAYOUT),
        (2, PREDICTION_FIRST),
    ],
    ids=["multi-latent attention", "experts with a bias", "expert parallel", "layout", "prediction before the loss"],
)
def test_losses_are_those_of_megatrons_own_1f1b(launch, ranks, model):
    own = launch(ranks, [*PIPELINE, *model, "--attention-backend", "local"]).check()
    ours = launch(ranks, [*PIPELINE, *model, *SEGMENTS]).check()
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)
    assert ours.losses("lm loss value") == pytest.approx(own.losses("lm loss value"), abs=1e-5)
    logged = {"z_loss": EXPERTS, "load_balancing_loss": BALANCED}
    for kind, flags in logged.items():
        assert len(own.losses(kind)) == (5 if set(flags) <= set(model) else 0)
        assert ours.losses(kind) == pytest.approx(own.losses(kind), rel=1e-5)
    assert len(own.losses("mtp_2 loss")) == (5 if set(PREDICTION) <= set(model) else 0)
    assert ours.losses("mtp_2 loss") == pytest.approx(own.losses("mtp_2 loss"), rel=1e-5)


def test_hybrid_models_have_the_losses_of_megatrons_own_1f1b(launch):
    flags, script = [*PIPELINE[2:], *RECURRENT, "--position-embedding-type", "rope"], ROOT / "pretrain_hybrid.py"
    own = launch(2, [*flags, "--attention-backend", "local"], script).check()
    ours = launch(2, [*flags, "--sequence-splits", "4"], script).check()
    assert len(own.losses()) == 5
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)


def test_losses_of_context_parallel_ranks_are_those_of_one(launch):
    """Two tokens more are predicted, whose losses are logged."""
    model = [*TINY_GPT, *EVALUATE, "--mock-data", *PREDICTION]
    own = launch(1, [*model, "--attention-backend", "local"]).check()
    ours = launch(2, [*model, *SEGMENTS, "--context-parallel-size", "2", "--cp-comm-type", "a2a"]).check()
    assert len(own.losses()) == 5
    for loss in ("lm loss", "lm loss value", "mtp_1 loss", "mtp_2 loss"):
        assert ours.losses(loss) == pytest.approx(own.losses(loss), abs=1e-5)
