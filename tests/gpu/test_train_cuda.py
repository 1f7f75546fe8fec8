"""Whole runs on GPUs, through the documented command; with -s each test prints the differences that it found."""

from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.gpu.training_runs import SAVED_STEP, STEPS, Rows, Run, Runs, needs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FP32 = ("parallel.ep=1", "precision.mode=fp32")
BF16 = ("parallel.ep=1", "precision.mode=bf16")
TE_BF16 = ("precision.mode=bf16", "experts.backend=te")
TE_FP8 = ("precision.mode=fp8_current", "experts.backend=te")

EXACT = Run(FP32)
EXACT_ON_CPU = Run((*FP32, "device=cpu"))
EXACT_EP2 = Run(("parallel.ep=2", "precision.mode=fp32"), num_ranks=2)
EXACT_DP2 = Run(FP32, num_ranks=2)

DETERMINISTIC = Run((*BF16, "train.deterministic=true"))
DETERMINISTIC_RESUMED = Run(DETERMINISTIC.overrides, resumes=DETERMINISTIC)

GROUPED = Run((*BF16, "experts.backend=grouped_mm"))
COMPILED = Run((*GROUPED.overrides, "train.compile=true"))
COMPILED_SELECTIVE = Run((*COMPILED.overrides, "train.activation_checkpointing=selective"))

SCALED_MM = Run(("parallel.ep=1", "precision.mode=fp8_current", "experts.backend=scaled_mm"))
SCALED_MM_FULL = Run((*SCALED_MM.overrides, "train.activation_checkpointing=full"))
SCALED_MM_EP2 = Run(("parallel.ep=2", *SCALED_MM.overrides[1:]), num_ranks=2)

TE = Run(("parallel.ep=1", *TE_BF16))
TE_EP2 = Run(("parallel.ep=2", *TE_BF16), num_ranks=2)
FP8 = Run(("parallel.ep=1", *TE_FP8))
FP8_EP2 = Run(("parallel.ep=2", *TE_FP8), num_ranks=2)
FP8_RESUMED_IN_BF16 = Run(GROUPED.overrides, resumes=FP8)
# The rates of the first two steps are those of the warmup, so that the figures of three don't depend on max_steps.
FP8_SELECTIVE, FP8_FULL = (
    Run((*FP8.overrides, "train.max_steps=3", f"train.activation_checkpointing={mode}"))
    for mode in ("selective", "full")
)


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Run], Rows]]:
    """What a run wrote, by step; all runs that the session's tests need are started before the first test."""
    runs = Runs(tmp_path_factory.mktemp("runs"))
    try:
        for item in request.session.items:
            for run in getattr(getattr(item, "function", None), "runs", ()):
                if run.obstacle() is None:
                    runs.start(run)
        yield runs.rows
    finally:
        runs.close()


# First, because these runs take longest.
@needs(GROUPED, COMPILED, COMPILED_SELECTIVE)
@pytest.mark.parametrize("compiled", [COMPILED, COMPILED_SELECTIVE], ids=["none", "selective"])
def test_compiled_blocks_loss_and_optimizer_train_as_eager_ones(rows, compiled):
    eager, found = rows(GROUPED), rows(compiled)
    # Fused, intermediate values keep fp32 where eager operations round to bf16 (2^-9 each). What is computed again
    # under activation checkpointing are the same values, so one eager run is compared with both.
    compare(found, eager, "grad_norm", rel=4e-3, steps=[1])
    compare(found, eager, "loss", rel=2e-3)


@needs(EXACT, DETERMINISTIC, DETERMINISTIC_RESUMED)
def test_bf16_follows_fp32_and_resumes_bit_for_bit_when_deterministic(rows):
    whole, resumed = rows(DETERMINISTIC), rows(DETERMINISTIC_RESUMED)
    compare(whole, rows(EXACT), "loss", rel=5e-3)
    assert sorted(resumed) == list(STEPS[SAVED_STEP:])
    compare(resumed, whole, "loss", rel=0.0, steps=resumed)


@needs(GROUPED, TE, FP8, FP8_RESUMED_IN_BF16)
def test_te_trains_like_grouped_mm_under_fsdp_and_a_checkpoint_crosses_backends_and_precisions(rows):
    compare(rows(TE), rows(GROUPED), "loss", rel=2e-3)
    compare(rows(FP8), rows(GROUPED), "loss", rel=1e-2)
    resumed = rows(FP8_RESUMED_IN_BF16)
    assert sorted(resumed) == list(STEPS[SAVED_STEP:])
    compare(resumed, rows(FP8), "loss", rel=1e-2, steps=resumed)


@needs(EXACT, EXACT_ON_CPU)
def test_fp32_on_a_gpu_equals_the_cpu(rows):
    gpu, cpu = rows(EXACT), rows(EXACT_ON_CPU)
    assert gpu.keys() == cpu.keys() == set(STEPS)
    compare(gpu, cpu, "loss", rel=1e-5)


@needs(EXACT, EXACT_EP2, EXACT_DP2)
@pytest.mark.parametrize("layout", [EXACT_EP2, EXACT_DP2], ids=["ep=2", "dp=2"])
def test_two_gpus_equal_one_in_fp32(rows, layout):
    one, two = rows(EXACT), rows(layout)
    assert two.keys() == one.keys()
    # Adam hides the scale of a gradient from the loss; the norm before any step does not.
    compare(two, one, "grad_norm", rel=1e-5, steps=[1])
    compare(two, one, "loss", rel=1e-5)


# Two bf16 roundings (2^-9 each) differ where sums are split; an FP8 scale per rank instead of one moves each factor by
# up to half of 2^-3, which averages out over the 128 terms of a sum. A factor of two would not pass.
@needs(TE, TE_EP2, FP8, FP8_EP2, SCALED_MM, SCALED_MM_EP2)
@pytest.mark.parametrize(
    ("on_one", "on_two", "norm_rel", "loss_rel"),
    [(TE, TE_EP2, 4e-3, 2e-3), (FP8, FP8_EP2, 2e-2, 1e-2), (SCALED_MM, SCALED_MM_EP2, 2e-2, 1e-2)],
    ids=["te-bf16", "te-fp8_current", "scaled_mm-fp8_current"],
)
def test_experts_on_two_gpus_equal_those_on_one(rows, on_one, on_two, norm_rel, loss_rel):
    one, two = rows(on_one), rows(on_two)
    compare(two, one, "grad_norm", rel=norm_rel, steps=[1])
    compare(two, one, "loss", rel=loss_rel)


@needs(FP8, FP8_SELECTIVE, FP8_FULL)
@pytest.mark.parametrize("checkpointed", [FP8_SELECTIVE, FP8_FULL], ids=["selective", "full"])
def test_te_under_activation_checkpointing_trains_as_without(rows, checkpointed):
    plain, found = rows(FP8), rows(checkpointed)
    assert found.keys() == {1, 2, 3}
    # The recomputed values are the same bits; only the order of atomic sums on the GPU may differ.
    compare(found, plain, "loss", rel=1e-4, steps=found)
    compare(found, plain, "grad_norm", rel=1e-3, steps=found)


@needs(SCALED_MM, SCALED_MM_FULL, GROUPED)
def test_scaled_mm_trains_like_bf16_and_recomputes_to_the_same(rows):
    compare(rows(SCALED_MM), rows(GROUPED), "loss", rel=1e-2)
    # Nothing is kept from the recomputation, so that only the order of atomic sums on the GPU may differ.
    compare(rows(SCALED_MM_FULL), rows(SCALED_MM), "loss", rel=1e-4)
    compare(rows(SCALED_MM_FULL), rows(SCALED_MM), "grad_norm", rel=1e-3)


@needs(SCALED_MM, FP8)
def test_scaled_mm_rounds_as_transformer_engine_does(rows):
    compare(rows(SCALED_MM), rows(FP8), "grad_norm", rel=1e-2, steps=[1])
    compare(rows(SCALED_MM), rows(FP8), "loss", rel=2e-3)


def compare(found: Rows, expected: Rows, key: str, *, rel: float, steps: Iterable[int] = STEPS) -> None:
    """Print the relative differences of a figure at these steps, and fail if one is larger than allowed."""
    differences = {step: abs(found[step][key] - expected[step][key]) / abs(expected[step][key]) for step in steps}
    text = ", ".join(f"{difference:.1e} at step {step}" for step, difference in differences.items())
    print(f"{key} differs by {text}; allowed: {rel:.1e}")
    for step, difference in differences.items():
        assert difference <= rel, f"{key} at step {step}: {found[step][key]}, expected {expected[step][key]}"
