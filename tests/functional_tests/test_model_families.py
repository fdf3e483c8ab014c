"""pretrain_gpt.py trains mixtures of experts and multi-latent attention on segments as Megatron's own schedule does."""

import pytest

from functional_tests.launch import TINY_GPT

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
UNBALANCED = ("--moe-router-load-balancing-type", "none")
BALANCED = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2")


@pytest.mark.parametrize("model", [LATENT, (*EXPERTS, *UNBALANCED)], ids=["multi-latent attention", "experts"])
def test_losses_are_those_of_megatrons_own_1f1b(launch, model):
    own = launch(2, [*PIPELINE, *model, "--attention-backend", "local"]).check()
    ours = launch(2, [*PIPELINE, *model, *SEGMENTS]).check()
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)
    assert ours.losses("lm loss value") == pytest.approx(own.losses("lm loss value"), abs=1e-5)
    assert ours.losses("z_loss") == pytest.approx(own.losses("z_loss"), rel=1e-5)


def test_experts_on_several_ranks_and_what_their_routers_log(launch):
    """However sequences are cut, a balance loss is a mean over all tokens; balance within a segment is a bit harder."""
    layout = ("--expert-model-parallel-size", "2", "--use-distributed-optimizer")
    flags = [*PIPELINE, *EXPERTS, *BALANCED, *layout]
    own = launch(4, [*flags, "--attention-backend", "local"]).check()
    ours = launch(4, [*flags, *SEGMENTS]).check()
    assert ours.losses() == pytest.approx(own.losses(), rel=1e-3)
    assert ours.losses("z_loss")[0] == pytest.approx(own.losses("z_loss")[0], rel=1e-6)
    expected = own.losses("load_balancing_loss")
    assert len(expected) == 5 and ours.losses("load_balancing_loss") == pytest.approx(expected, rel=2e-2)
