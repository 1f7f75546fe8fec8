"""The training loop."""

from moe_framework.data.loader import TrainLoader, heldout_batches
from moe_framework.errors import TrainingError
from moe_framework.optim.schedule import learning_rate
from moe_framework.resilience.lifeline import Lifeline
from moe_framework.train.build import Training
from moe_framework.train.evaluate import measure
from moe_framework.train.persist import Position
from moe_framework.train.report import Reporter
from moe_framework.train.saving import Saver
from moe_framework.train.step import Objective, StepResult, agree_on_counts, train_step


def train(training: Training, position: Position, reporter: Reporter, saver: Saver, lifeline: Lifeline) -> Position:
    """Train from a position to `train.max_steps`, or until a rank is told to stop; the end is saved.

    Args:
        training: The run.
        position: Where to start.
        reporter: Where figures go.
        saver: Saves.
        lifeline: Knows whether to stop, and hears that the run goes on.

    Returns:
        Where the run is; before `train.max_steps` if it was told to stop.

    Raises:
        DataError: The data of a rank ended; on every rank.
        TrainingError: Too many steps in a row were not finite; on every rank.
        CheckpointError: Too many saves failed; on every rank.

    Collective: the world; every rank must call.
    """
    config, num_bad, start = training.config, 0, position
    objective = Objective(config.moe.aux_loss_coeff, config.moe.z_loss_coeff)
    with training.loader(position.consumed_samples) as loader:
        reporter.start()
        for step in range(position.step + 1, config.train.max_steps + 1):
            lifeline.begin_step(step)
            batches = _next_batches(loader)
            copies, stop = training.mesh.tp.size(), lifeline.told_to_stop
            counts = agree_on_counts(batches, training.mesh.world_group, copies=copies, stop=stop)
            if counts.stop:
                break
            rate = _set_learning_rate(training, step - 1)
            result = train_step(
                training.model,
                training.optimizer,
                [batch.to(training.runtime.device) for batch in batches],  # pyright: ignore
                counts,
                mesh=training.mesh,
                objective=objective,
                clip_norm=config.optim.clip_norm,
            )
            samples = range(position.consumed_samples, loader.consumed_samples)
            position = Position(step, loader.consumed_samples)
            reporter.end_step(step, result, counts, rate, samples)
            num_bad = _check_finite(training, saver, position, result, num_bad)
            saver.poll()
            if step == config.train.max_steps:
                break
            if _due(step, config.eval.every):
                lifeline.note("evaluation")
                with reporter.paused():
                    loss = evaluate_heldout(training, lifeline, config.eval.max_rows)
                reporter.heldout(step, loss)
            if num_bad == 0 and _due(step, config.checkpoint.every):
                lifeline.note("save")
                with reporter.paused():
                    saver.save(position)
    if position != start:
        with reporter.paused():
            saver.save_and_wait(position)
    return position


def evaluate_heldout(training: Training, lifeline: Lifeline, max_rows: int = 0) -> float:
    """Return the loss on the held-out region, in nats per target.

    Args:
        training: The run.
        lifeline: Hears of each batch.
        max_rows: Rows to use, evenly spread; 0 for all.

    Collective: the world; every rank must call.
    """
    batches = heldout_batches(
        training.data.heldout,
        micro_batch_size=training.config.train.micro_batch_size,
        data_rank=training.mesh.data_rank,
        num_data_ranks=training.mesh.num_data_ranks,
        max_rows=max_rows,
    )
    batches, device = lifeline.beating(batches), training.runtime.device
    return measure(training.model, batches, mesh=training.mesh, device=device).loss


def _next_batches(loader: TrainLoader):
    """This rank's micro-batches, or its error: the other ranks must hear of it before anyone stops."""
    try:
        return loader.next_step()
    except Exception as error:
        return error


def _set_learning_rate(training: Training, steps_done: int) -> float:
    config = training.config
    rate = learning_rate(
        steps_done,
        lr=config.optim.lr,
        min_lr=config.optim.min_lr,
        warmup_steps=config.optim.warmup_steps,
        max_steps=config.train.max_steps,
        schedule=config.optim.schedule,
        decay_steps=config.optim.decay_steps,
    )
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _check_finite(training: Training, saver: Saver, position: Position, result: StepResult, num_bad: int) -> int:
    """Count the steps in a row that were skipped, and stop after too many."""
    if result.applied:
        return 0
    limit = training.config.train.max_nonfinite_steps
    if num_bad + 1 < limit:
        return num_bad + 1
    raise TrainingError(
        f"loss={result.loss}, grad_norm={result.grad_norm} at step {position.step}: not finite for {num_bad + 1} steps "
        f"in a row (train.max_nonfinite_steps={limit}). The weights are those before these steps; "
        f"the last checkpoint is {saver.newest()}. Lower optim.lr or look at the data."
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
