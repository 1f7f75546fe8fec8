"""The report of an evaluation, as text and as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moe_framework.config.schema import Config
from moe_framework.observe.router_health import LayerHealth, router_health
from moe_framework.train.evaluation import Evaluation, Source

_BASELINES = {
    "uniform_loss": "guessing",
    "markov1_loss": "Markov, order 1",
    "markov3_loss": "Markov, order 3",
    "markov_best_loss": "Markov, best of orders 0 to 8",
}


def report_of(found: Evaluation, config: Config, split: str) -> dict[str, Any]:
    """Return what was measured as JSON values.

    Args:
        found: The evaluation.
        config: Its configuration.
        split: `heldout` or `all`.

    Returns:
        Losses in nats per target; the whole first, then each data set and each layer.
    """
    num_tokens = sum(source.measured.num_tokens for source in found.sources)
    return {
        "checkpoint": str(found.checkpoint),
        "data": config.data.path,
        "split": split,
        "max_rows": config.eval.max_rows,
        "seq_length": config.data.seq_length,
        "heldout_fraction": config.data.heldout_fraction if split == "heldout" else None,
        **_figures(found.sources),
        "tokens_per_second": num_tokens / max(found.seconds, 1e-9),
        "seconds": found.seconds,
        "baselines": found.baselines,
        "sources": [{"path": source.path, **_figures((source,))} for source in found.sources],
        "max_over_mean_load": [layer.max_over_mean for layer in _health(found.sources)],
        "experts_never_used": [layer.never_used for layer in _health(found.sources)],
        "layout": asdict(config.parallel),
        "precision": config.precision.mode,
        "experts_backend": found.experts_backend,
    }


def to_text(report: Mapping[str, Any]) -> str:
    """Return a report as lines.

    Args:
        report: From `report_of`.
    """
    of = "every row" if report["split"] == "all" else f"held out: the last {report['heldout_fraction']:.2%}"
    chosen = f", at most {report['max_rows']:,} rows" if report["max_rows"] else ""
    lines = [
        f"checkpoint      {report['checkpoint']}",
        f"data            {report['data'] or 'the demo genome'} ({of}{chosen})",
        f"rows            {report['rows']:,} of {report['seq_length']:,} positions",
        f"targets         {report['targets']:,}",
        f"loss            {report['loss']:.6f} nats per target",
        f"                {report['bits_per_target']:.6f} bits per target",
        f"perplexity      {report['perplexity']:,.4f}",
        f"accuracy        {report['accuracy']:.2%} of the targets are the most likely token",
    ]
    whole = " on all held-out targets" if report["max_rows"] and len(report["baselines"]) > 1 else ""
    lines += [
        f"  to compare    {loss:.6f} nats: {_BASELINES[name]}{whole if name.startswith('markov') else ''}"
        for name, loss in report["baselines"].items()
    ]
    if len(report["sources"]) > 1:
        lines += [f"  {_source_line(source)}" for source in report["sources"]]
    lines += ["expert load     busiest over mean, by layer; 1 is balanced"]
    for layer, (load, unused) in enumerate(
        zip(report["max_over_mean_load"], report["experts_never_used"], strict=True)
    ):
        never = f", {len(unused)} experts without a token" if unused else ""
        lines.append(f"  layer {layer:<8}{load:.3f}{never}")
    lines.append(f"speed           {report['tokens_per_second']:,.0f} tokens/s, {report['seconds']:,.1f} s")
    return "\n".join(lines)


def _source_line(source: Mapping[str, Any]) -> str:
    if not source["targets"]:
        return f"{source['path']}: no target in {source['rows']:,} rows"
    return (
        f"{source['path']}: loss {source['loss']:.6f}, perplexity {source['perplexity']:,.4f}, accuracy "
        f"{source['accuracy']:.2%}, {source['targets']:,} targets in {source['rows']:,} rows"
    )


def _figures(sources: tuple[Source, ...]) -> dict[str, Any]:
    """The figures of some data sets together; a loss of nothing is NaN."""
    targets = sum(source.measured.num_targets for source in sources)
    loss = sum(source.measured.loss_sum for source in sources) / targets if targets else math.nan
    return {
        "loss": loss,
        "perplexity": math.inf if loss > math.log(1e300) else math.exp(loss),
        "bits_per_target": loss / math.log(2),
        "accuracy": sum(source.num_correct for source in sources) / targets if targets else math.nan,
        "targets": targets,
        "tokens": sum(source.measured.num_tokens for source in sources),
        "rows": sum(source.num_rows for source in sources),
    }


def _health(sources: tuple[Source, ...]) -> list[LayerHealth]:
    measured = [source.measured for source in sources if source.measured.tokens_per_expert_LE is not None]
    loads = [one.tokens_per_expert_LE for one in measured if one.tokens_per_expert_LE is not None]
    entropies = [one.entropy_L for one in measured if one.entropy_L is not None]
    if not loads:
        return []
    return router_health(
        sum(loads[1:], loads[0]), sum(entropies[1:], entropies[0]), sum(m.num_tokens for m in measured)
    )
