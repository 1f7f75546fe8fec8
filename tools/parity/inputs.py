"""The batches that every layout and its reference train on, through the loader that training uses."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moe_framework.config.schema import Config
from moe_framework.data.loader import Batch, TrainLoader
from moe_framework.data.sources import open_data
from moe_framework.data.tokenizer import IGNORE_INDEX
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.train.build import cut_of

BASES = "ACGT"


def write_documents(path: Path, config: Config, *, steps: int, seed: int) -> None:
    """Write random sequences, some shorter than a row and some longer, so that rows are packed and padded.

    Args:
        path: The FASTA file.
        config: For the number and length of rows.
        steps: Steps that shall not meet a row twice.
        seed: Of lengths and bases.
    """
    rng = np.random.default_rng((seed, 1))
    alphabet, length = np.array(list(BASES)), config.data.seq_length
    # Twice the rows that are used: packing leaves gaps, and the loader keeps a part for evaluation.
    needed = 2 * (steps + 1) * config.train.global_batch_size * length
    lines, written = [], 0
    while written < needed:
        bases = int(rng.integers(max(length // 8, 2), 2 * length + 1))
        sequence = "".join(alphabet[rng.integers(0, len(alphabet), bases)])
        lines.append(f">{len(lines)}\n{sequence}\n")
        written += bases
    path.write_text("".join(lines))


def make_loader(config: Config, mesh: ParallelMesh) -> TrainLoader:
    """Make a rank's loader, as training does."""
    data = config.data
    return TrainLoader(
        open_data(data.path, cut_of(config)).train,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_rank=mesh.data_rank,
        num_data_ranks=mesh.num_data_ranks,
        seed=config.train.seed,
        reverse_complement=data.reverse_complement,
        prefetch=0,
    )


def over_whole_vocabulary(batch: Batch, vocab_size: int, seed: int) -> Batch:
    """Replace the tokens, keeping documents, padding and what has no loss.

    The loader's eight nucleotides would leave most of a vocabulary, and the ranks that hold it, without work.

    Args:
        batch: From the loader.
        vocab_size: V.
        seed: With a row's global sample index, decides its tokens.
    """
    tokens, targets = batch.tokens.clone(), batch.targets.clone()
    for row, sample in enumerate(batch.sample_ids):
        rng = np.random.default_rng((seed, 2, sample))
        drawn = torch.from_numpy(rng.integers(0, vocab_size, (2, tokens.shape[1])))
        tokens[row] = drawn[0]
        targets[row] = torch.where(batch.targets[row] == IGNORE_INDEX, IGNORE_INDEX, drawn[1])
    return replace(batch, tokens=tokens, targets=targets)


def row_digests(batches: list[Batch]) -> list[tuple[int, str]]:
    """Return the global sample index of each row and a digest of what the loader read for it."""
    found = []
    for batch in batches:
        for row, sample in enumerate(batch.sample_ids):
            content = torch.stack((batch.tokens[row], batch.targets[row], batch.positions[row]))
            found.append((sample, hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]))
    return found
