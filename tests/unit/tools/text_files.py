"""A tokenizer of single bytes, so that a test can say which tokens a text has, and the command run in this process."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_framework.data.indexed import read_indexed
from tools.prepare_text import main

BOS, EOS, EXTRA = 256, 257, 258
VOCAB_SIZE = 259


def make_tokenizer(folder: Path, **settings: Any) -> Path:
    """Write a folder whose tokenizer puts BOS before each text by itself, as many do; `settings` go into its JSON."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    content = json.loads(tokenizer.to_str())
    content["model"] |= settings.pop("model", {})
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content | settings))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text in the tokenizer of `make_tokenizer`, without BOS and EOS."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [alphabet.index(letter) for piece, _ in encoded for letter in piece]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    """Write one document a line."""
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def run(folder: Path, *arguments: str | Path) -> int:
    """Run the command with the tokenizer and the output of a folder."""
    return main(["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "out"), *map(str, arguments)])


def documents_of(prefix: Path) -> list[list[int]]:
    """Return the tokens of each document."""
    read = read_indexed(str(prefix))
    borders = [read.start_of(document) for document in range(read.num_documents + 1)]
    return [np.asarray(read.tokens[a:b]).tolist() for a, b in itertools.pairwise(borders)]


def outputs(folder: Path) -> list[str]:
    """Return the names of all files of the output, finished or not."""
    return sorted(path.name for path in folder.glob("out*"))
