# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # names that it shares with the scripts that source it
# What is tested with another version of PyTorch or of Megatron than the pinned one. Sourced at the root of the
# repository by a script that has set `python`, the interpreter, and `row`, the beginning of a row of a table.

# A step of every third suite that has to equal Megatron's.
steps=(
    "pp2/0/1f1b-k3-m5-uneven-segment"
    "pp2/6-fp32/1f1b-k3-m3-uneven-random"
    "pp2-split/0/zb-h1-k3-m5-uneven-random"
    "pp2-chunks3/0-c3/breadth-first-k3-m3-uneven-random"
    "pp2-v/0-c2-v/auto-k3-m3-uneven-random"
    "pp2-documents/0/1f1b-k3-m2-documents-random-tokens"
    "pp2-windows/0/1f1b-k3-m3-uneven-random"
    "pp2-mtp/0/zb-h1-k3-m3-uneven-random"
    "pp2-moe/0/1f1b-k3-m3-uneven-random"
    "pp2-latents/0-latents/1f1b-k3-m3-uneven-random-mask"
    "pp2-delta-net/0-GFAG/zb-h1-k3-m3-uneven-random"
    "pp2-mamba/0-MFAM/1f1b-k3-m3-uneven-random"
    "offload/0-offloads-1/zb-h1-k4-m3-uneven-random"
    "kept-attention/0-kv2-full-but-attention/1f1b-k3-m3-uneven-random"
    "recompute-modules/0-selective/zb-h1-k3-m3-uneven-random"
    "units/0-per-token/1f1b-k3-m2-even-random-units"
    "dp2/0/1f1b-k3-m3-uneven-random"
    "cp2/0/1f1b-k3-m5-uneven-random"
    "tp2-moe/0-sp/zb-h1-k3-m3-uneven-random"
    "pp2-dp2-overlap/0-learned_absolute-tied-overlap/1f1b-k3-m1-even-random"
    "transformer-engine/0-unfused/zb-h1-k3-m2-uneven-random"
)

of_steps=()
for step in "${steps[@]}"; do
    of_steps+=("tests/functional_tests/test_equality.py::test_a_step[$step]")
done
# Two trainings on two ranks.
training=tests/functional_tests/test_seq1f1b_training.py::test_losses_are_those_of_megatrons_own_1f1b
trainings=("${training}[layout]" "${training}[bf16]")
# The unit tests of what trains.
units=(-m unit tests/unit_tests/{platform,launch,model,runtime,schedule})

unset PYTHONDONTWRITEBYTECODE # else each of many processes would compile torch and Megatron anew
export OMP_NUM_THREADS=1
status=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# part TEST...: run tests, and add to the row what pytest counts. Libraries may print after it. Each part runs even if an
# earlier one has failed.
part() {
    "$python" -m pytest -q "$@" 2>&1 | tee "$log" || status=1
    row+=" $(sed -nE 's/^([0-9]+ (passed|failed|skipped|error).*) in [0-9.]+s.*/\1/p' "$log" | tail -n 1) |"
}
