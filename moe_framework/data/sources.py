"""Opens what `data.path` names: a FASTA file, token files, or several of either with their shares."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from moe_framework.data.blend import BLOCK, BlendedRows, counts_of
from moe_framework.data.fasta import Sequences, read_fasta
from moe_framework.data.indexed import SUFFIXES, indexed_prefix, read_indexed
from moe_framework.data.packing import Region, Rows, build_rows, split_regions
from moe_framework.data.rows import RowSource
from moe_framework.data.token_rows import split_tokens
from moe_framework.data.tokenizer import A
from moe_framework.errors import ConfigError, DataError

# A, C, G and T are targets; the other tokens are not.
NUM_BASES = 4


@dataclass(frozen=True, eq=False)
class Data:
    """The rows of a run.

    Attributes:
        train: Rows of the part that is trained on.
        heldout: Rows of the part that training never sees.
        fingerprint: Equal on ranks that read equal data.
        sequences: The one FASTA file that they come from; None for anything else.
        alphabet_size: Tokens that a target may be.
    """

    train: RowSource
    heldout: RowSource
    fingerprint: str
    sequences: Sequences | None
    alphabet_size: int


@dataclass(frozen=True)
class Cut:
    """How data becomes rows: the keys of the `data` section, and the model's vocabulary.

    Attributes:
        seq_length: Positions of a row.
        heldout_fraction: Share at the end of each file to hold out.
        stride: Tokens by which training windows overlap; FASTA only.
        reverse_complement: Whether rows are read from either strand; FASTA only.
        separate_documents: See `TokenRows`; token files only.
        vocab_size: Of the model.
        whole: Whether every file is a test set: all of it is held out, and there is no training part.
    """

    seq_length: int
    heldout_fraction: float
    stride: int = 0
    reverse_complement: bool = False
    separate_documents: bool = True
    vocab_size: int = 2**31
    whole: bool = False

    @property
    def share(self) -> float:
        """Share at the end of each file that is held out, up to 1."""
        return 1.0 if self.whole else self.heldout_fraction


def open_data(path: str | None, cut: Cut) -> Data:
    """Open the data and cut it into rows.

    Args:
        path: A FASTA file; token files, by their prefix or either file; several of one kind with their weights,
            `0.7 /a 0.3 /b`; or null for the genome of the `demo` extra.
        cut: How.

    Returns:
        The rows.

    Raises:
        ConfigError: A key that this kind of data does not have, or weights that cannot be used.
        DataError: A file cannot be used, or its training or held-out part has nothing to predict.
        DependencyError: `path` is null and the `demo` extra is not installed.
    """
    weighted = parse_weights(path)
    if weighted is None:
        return _open_one(path, cut)
    weights, paths = zip(*weighted, strict=True)
    counts = counts_of(weights)
    if 0 in counts:
        name = paths[counts.index(0)]
        raise ConfigError(
            f"data.path={path}: {name} has less than about 1/{BLOCK} of the weights. Raise its weight, or leave it out."
        )
    parts = [_open_one(name, cut) for name in paths]
    if len({part.alphabet_size for part in parts}) > 1:
        raise ConfigError(f"data.path={path} mixes FASTA and token files. Give files of one kind.")
    digest = hashlib.sha256(str(counts).encode())
    for part in parts:
        digest.update(part.fingerprint.encode())
    return Data(
        train=BlendedRows(tuple(part.train for part in parts), counts),
        heldout=BlendedRows(tuple(part.heldout for part in parts), counts),
        fingerprint=digest.hexdigest(),
        sequences=None,
        alphabet_size=parts[0].alphabet_size,
    )


def files_of(path: str) -> list[str]:
    """Return the files that a data path names, whether or not they exist; nothing is opened.

    Raises:
        ConfigError: See `parse_weights`.
    """
    files = []
    for name in [name for _, name in parse_weights(path) or [(1.0, path)]]:
        prefix = indexed_prefix(name)
        files += [name] if prefix is None else [prefix + suffix for suffix in SUFFIXES]
    return files


def parse_weights(path: str | None) -> list[tuple[float, str]] | None:
    """Read `weight path weight path …`, as Megatron-LM's --data-path has it.

    Args:
        path: From `data.path`.

    Returns:
        Weights and paths, or None if it is one path.

    Raises:
        ConfigError: It begins with a weight, and is no list of pairs, or a weight is not positive.
    """
    words = (path or "").split()
    if len(words) < 2 or _number(words[0]) is None:
        return None
    pairs = list(zip(words[::2], words[1::2], strict=False))
    weights = [_number(weight) for weight, _ in pairs]
    if len(words) % 2 or any(weight is None or not 0 < weight < float("inf") for weight in weights):
        raise ConfigError(
            f"data.path={path}: several files are given as 'weight path weight path …' with positive weights and no "
            "spaces in paths. Such as data.path='0.7 /data/a 0.3 /data/b'."
        )
    return [(weight or 0.0, name) for weight, (_, name) in zip(weights, pairs, strict=True)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _open_one(path: str | None, cut: Cut) -> Data:
    prefix = indexed_prefix(path) if path is not None else None
    return _open_fasta(path, cut) if prefix is None else _open_tokens(prefix, cut)


def _open_tokens(prefix: str, cut: Cut) -> Data:
    unset = {"stride": 0, "reverse_complement": False}
    used = {key: value for key, none in unset.items() if (value := getattr(cut, key)) != none}
    if used:
        raise ConfigError(
            [
                f"data.{key}={value} needs FASTA, and data.path={prefix} names token files. "
                f"Set data.{key}={unset[key]}."
                for key, value in used.items()
            ]
        )
    tokens = read_indexed(prefix)
    _check_vocabulary(prefix, cut.vocab_size)
    train, heldout = split_tokens(
        tokens,
        cut.share,
        seq_length=cut.seq_length,
        vocab_size=cut.vocab_size,
        separate_documents=cut.separate_documents,
    )
    if cut.whole and len(heldout) == 0:
        raise DataError(
            f"data.path={prefix}: the file has {tokens.num_tokens} tokens, too few for a row of "
            f"data.seq_length={cut.seq_length} and a last target. Shorten the rows, or give more tokens."
        )
    for name, rows, verb in (("training", train, "Lower"), ("held-out", heldout, "Raise")):
        if len(rows) == 0 and not cut.whole:
            raise DataError(
                f"data.heldout_fraction={cut.heldout_fraction}: the {name} part of {prefix} has "
                f"{rows.stop - rows.start} of {tokens.num_tokens} tokens, too few for a row of "
                f"data.seq_length={cut.seq_length} and a last target. {verb} "
                "data.heldout_fraction, shorten the rows, or give more tokens."
            )
    return Data(train, heldout, tokens.fingerprint, None, cut.vocab_size)


def _check_vocabulary(prefix: str, vocab_size: int) -> None:
    """Refuse a model that is too small for the tokenizer before it trains, where the files say what made them."""
    try:
        needed = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # Megatron's tools write no such file: a token that is too large is refused when it is read
    if isinstance(needed, int) and needed > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} must be at least {needed}, the vocabulary of the tokenizer that made "
            f"{prefix} ({prefix}.json). Set model.vocab_size={needed}, or more."
        )


def _open_fasta(path: str | None, cut: Cut) -> Data:
    if not cut.separate_documents:
        raise ConfigError("data.separate_documents=false needs token files, and data.path names FASTA. Unset it.")
    sequences = read_fasta(path)
    train, heldout = split_regions(sequences, cut.share)
    # Held-out rows never overlap, whatever the stride is, so that each held-out base counts once in the loss.
    train_rows = build_rows(sequences, train, cut.seq_length, cut.stride)
    heldout_rows = build_rows(sequences, heldout, cut.seq_length)
    if cut.whole and not _has_target(sequences, heldout, heldout_rows):
        raise DataError(
            f"data.path={sequences.path}: the file has no A, C, G or T to predict ({sequences.num_bases} bases). "
            "Give another file."
        )
    for name, region, rows, verb in (
        ("training", train, train_rows, "Lower"),
        ("held-out", heldout, heldout_rows, "Raise"),
    ):
        if not cut.whole and not _has_target(sequences, region, rows):
            raise DataError(
                f"data.heldout_fraction={cut.heldout_fraction}: the {name} part of {sequences.path} has no A, C, G or "
                f"T to predict ({region.stop - region.start} of {sequences.num_bases} bases, {len(rows)} rows of "
                f"data.seq_length={cut.seq_length}). {verb} data.heldout_fraction, or give a longer file."
            )
    return Data(train_rows, heldout_rows, sequences.fingerprint, sequences, NUM_BASES)


def _has_target(sequences: Sequences, region: Region, rows: Rows) -> bool:
    # The first base after the cut has nothing before it to be predicted from.
    first = region.start + int(region.start not in sequences.offsets)
    return len(rows) > 0 and bool((sequences.tokens[first : region.stop] >= A).any())
