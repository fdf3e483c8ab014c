"""The sections of the suite that train a small GPT on pipeline ranks, against Megatron's own run on one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gpu_tests import nccl
from gpu_tests.suite import LOSS_TOLERANCE, NOT_RUN, Found, Suite, agree, check

OVER_GLOO = "1f1b,zb-h1,recompute,offload,chunks,v"
OVER_NCCL = "1f1b,chunks,zb-h1-chunks,v,offload"
QUEUES = (1, 8, 32)  # as the launchers set it, as CUDA has it, and the most
SYNCHRONISES = "synchronizing CUDA operation"  # words of the error of torch.cuda.set_sync_debug_mode
# Units of an eighth of the longest sequence.
UNITS = ("--segments", "8", "--unequal")


def same_losses(own: Found, ours: Found, what: str) -> Found:
    """All that was found by ours, and whether each variant has the losses of Megatron's own run."""
    found = Found(list(ours.checks), [{**figure, "run": what} for figure in ours.figures])
    for figure in ours.figures if own.figures else ():
        for dtype, tolerance in LOSS_TOLERANCE.items():
            name = f"{what}, {figure['variant']}, {dtype}: losses of Megatron's own single rank"
            found.checks.append(agree(name, figure[dtype], own.figures[0][dtype], tolerance))
    return found


def over_gloo(suite: Suite) -> Found:
    """Four ranks on one GPU."""
    own, ours = suite.beside(
        partial(suite.program, "ranks", output="own"),
        partial(suite.program, "ranks", "--segments", "4", "--variants", OVER_GLOO, ranks=4, output="gloo"),
    )
    return Found(own.checks) + same_losses(own, ours, "4 ranks over gloo")


def units(suite: Suite) -> Found:
    """One long sequence and seven short ones: losses of each alone, in less memory than packs take."""
    own, ours = suite.beside(
        partial(suite.program, "ranks", "--unequal", output="own-unequal"),
        partial(suite.program, "ranks", *UNITS, "--variants", "units,packs", ranks=2, output="units"),
    )
    found = Found(own.checks) + same_losses(own, ours, "2 ranks over gloo")
    peaks = {figure["variant"]: figure["bfloat16_peak"] for figure in ours.figures}
    if len(peaks) == 2:
        ratio = peaks["units"] / max(peaks["packs"], 1)
        name = "units of an eighth of the longest sequence: less memory than packs"
        found.check(name, None if suite.tiny else ratio < 1, f"{ratio:.2f} of it")
    return found


def over_nccl(suite: Suite, gpus: int) -> Found:
    """Two and four ranks, with a GPU each, or on one where NCCL allows it; on a CPU the same over gloo."""
    if suite.device == "cpu" or gpus == 1:
        return on_one_gpu(suite, partial(runs_over_nccl, most_ranks=4))
    found = runs_over_nccl(suite, 4 if gpus >= 4 else 2)
    with_two = Found(figures=[{"table": "nccl", "settings": "a GPU for each rank", "works": True}])
    return with_two + found


def pairs(suite: Suite, gpus: int) -> Found:
    """Two ranks that share the experts, each forward beside a backward; on as many hardware queues as streams need."""

    def run(of_ranks: Suite) -> Found:
        return of_ranks.program("pairs", "--backend", backend_of(suite), ranks=2, queues=QUEUES[-1])

    return on_one_gpu(suite, run) if suite.device == "cpu" or gpus == 1 else run(suite)


def on_one_gpu(suite: Suite, run: Callable[[Suite], Found]) -> Found:
    """What is found with the first settings of NCCL that work."""
    version = nccl.version()
    if suite.device == "cuda" and (version is None or version < nccl.FIRST_VERSION):
        here = "none" if version is None else ".".join(map(str, version))
        found = Found()
        found.check(
            "several ranks on one GPU over NCCL",
            None,
            f"{NOT_RUN}needs NCCL 2.30 or later (here: {here}), or two GPUs; docs/first-gpu.md shows how to bring one",
        )
        return found
    with nccl.mps() as of_mps:
        environment, found = nccl.working(suite, of_mps, backend_of(suite))
        if environment is None:
            tried = "; ".join(f"{figure['settings']}: {figure['found']}" for figure in found.figures)
            found.check("several ranks on one GPU over NCCL", None, f"{NOT_RUN}no settings of NCCL work: {tried}")
            return found
        settings = found.figures[-1]["settings"]
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        print(f"NCCL lets ranks share the GPU: {settings}, {variables}", flush=True)
        found.check("several ranks on one GPU over NCCL", True, f"{settings}: {variables}")
        return found + run(replace(suite, environment=environment))


def backend_of(suite: Suite) -> str:
    return "nccl" if suite.device == "cuda" else "gloo"


def runs_over_nccl(suite: Suite, most_ranks: int) -> Found:
    """Messages of 16 MB in fp32 and 8 MB in bf16; hardware queues as set by the launchers and as CUDA has them; fewer
    thread blocks for messages; then more ranks, and units."""
    sizes = ("--hidden", "64" if suite.tiny else "2048")
    ours = ("--segments", "2", "--backend", backend_of(suite), *sizes)

    def of_two(queues: int, variants: str, ctas: int = 4) -> Found:
        return suite.program(
            "ranks",
            *ours,
            *("--variants", variants, "--ctas", str(ctas)),
            ranks=2,
            queues=queues,
            output=f"nccl-2-queues-{queues}-ctas-{ctas}",
        )

    # The first run over NCCL has the GPU for itself.
    own, first = suite.program("ranks", *sizes, output="own-nccl"), of_two(QUEUES[0], OVER_NCCL)
    found = Found(own.checks) + same_losses(own, first, f"2 ranks over NCCL, {QUEUES[0]} queue")
    queues = QUEUES[-1:] if suite.tiny else QUEUES[1:]  # a CPU has none
    variants = "1f1b" if suite.tiny else OVER_NCCL
    *of_queues, few, four, own_unequal, in_units = suite.beside(
        *(partial(of_two, each, variants) for each in queues),
        partial(of_two, QUEUES[-1], "1f1b", ctas=2),
        partial(
            suite.program,
            "ranks",
            *(*ours, "--variants", OVER_NCCL),
            ranks=most_ranks,
            output=f"nccl-{most_ranks}",
        ),
        partial(suite.program, "ranks", "--unequal", output="own-unequal-nccl"),
        partial(
            suite.program,
            "ranks",
            *(*UNITS, "--backend", backend_of(suite), "--variants", "units"),
            ranks=2,
            output="nccl-units",
        ),
    )
    for number, each in zip(queues, of_queues, strict=True):
        found += same_losses(own, each, f"2 ranks over NCCL, {number} queues")
    found += same_losses(own, few, f"2 ranks over NCCL, {QUEUES[-1]} queues, 2 thread blocks for messages")
    found += same_losses(own, four, f"{most_ranks} ranks over NCCL, 1 queue")
    found += Found(own_unequal.checks) + same_losses(own_unequal, in_units, "2 ranks over NCCL, units")
    found.checks.append(waits_of_the_host(found))
    return found


def waits_of_the_host(found: Found) -> dict:
    """The check that no step but the first, of the runs over NCCL, made the host wait for the GPU."""
    name = "the host waits for nothing in steps 2 and 3"
    waits = [each["found"] for each in found.checks if SYNCHRONISES in each["found"]]
    watched = [f"{figure['run']}, {figure['variant']}" for figure in found.figures if figure.get("watched")]
    if waits:
        return check(name, False, "; ".join(waits))
    if not watched:
        return check(name, None, "it is watched over NCCL alone, and no such run came to its end")
    return check(name, True, "; ".join(watched))
