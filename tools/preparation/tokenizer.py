"""A Hugging Face tokenizer that turns documents into tokens; the one home of the tokenizers library."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_framework.errors import DataError, DependencyError
from tools.preparation.documents import Document
from tools.preparation.special_tokens import SpecialToken, end_of_document, named_token, read_json

TOKENIZER_FILE = "tokenizer.json"
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_GIVE_FAST = f"Give a Hugging Face folder with {TOKENIZER_FILE}, or that file."


class Encoded(NamedTuple):
    """A document's tokens.

    Attributes:
        tokens: `[tokens] int32`, with BOS and EOS; empty if the text has no token.
        num_eos_in_text: How often the text itself has the end-of-document token.
        num_unknown: Tokens that stand for text that the tokenizer does not know.
    """

    tokens: np.ndarray
    num_eos_in_text: int
    num_unknown: int


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """Encodes documents; may be used by several threads at once.

    Attributes:
        name: Name of its folder or file.
        sha256: Hash of its file, in hexadecimal.
        vocab_size: Rows that a model of it needs: above every token's number, and at least what its config.json says.
        bos: Put before each document, or None.
        eos: Put after each document, or None.
        library_version: Of the tokenizers library.
    """

    name: str
    sha256: str
    vocab_size: int
    bos: SpecialToken | None
    eos: SpecialToken | None
    library_version: str
    _tokenizer: Any
    _unknown: int | None

    def encode(self, document: Document) -> Encoded:
        """Encode one document.

        Raises:
            DataError: The tokenizer cannot encode the text.
        """
        try:
            # A batch of one, since it runs in this thread and other threads run meanwhile, while `encode` keeps them
            # waiting. What the tokenizer itself would add to each text is left out: `bos` and `eos` are all.
            (encoding,) = self._tokenizer.encode_batch_fast([document.text], add_special_tokens=False)
        except Exception as error:
            # The library raises nothing more specific.
            raise DataError(
                f"{document.place}: the tokenizer cannot encode it ({error}). Correct or remove the document."
            ) from None
        ids = encoding.ids
        if not ids:
            return Encoded(np.empty(0, np.int32), 0, 0)
        tokens = np.empty(len(ids) + (self.bos is not None) + (self.eos is not None), np.int32)
        text = tokens[self.bos is not None :][: len(ids)]
        text[:] = ids
        num_eos = 0 if self.eos is None else int(np.count_nonzero(text == self.eos.id))
        num_unknown = 0 if self._unknown is None else int(np.count_nonzero(text == self._unknown))
        if self.bos is not None:
            tokens[0] = self.bos.id
        if self.eos is not None:
            tokens[-1] = self.eos.id
        return Encoded(tokens, num_eos, num_unknown)


def load_tokenizer(
    path: Path, *, bos: str | None = None, eos: str | None = None, no_eos: bool = False
) -> TextTokenizer:
    """Read a tokenizer.

    Args:
        path: A tokenizer.json, or a folder with one.
        bos: Token to put before each document, or None for none.
        eos: Token to put after each document; None for the one that the folder names.
        no_eos: Put none after it.

    Raises:
        DataError: It is no such tokenizer, or it lacks one of the tokens, or nothing says what ends a document.
        DependencyError: The tokenizers library is missing.
    """
    file, folder = _locate(path)
    content, sha256 = _read(file)
    library = _import_tokenizers(path)
    try:
        tokenizer = library.Tokenizer.from_str(content)
    except Exception as error:
        raise DataError(f"--tokenizer={file}: no tokenizer that can be read ({error}). {_GIVE_FAST}") from None
    # A file may carry what a model's inputs once needed; here it would cut documents without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = json.loads(content)["model"]
    if model.get("dropout"):
        raise DataError(
            f"--tokenizer={file}: dropout={model['dropout']} draws tokens at random. Set it to null in the file."
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return TextTokenizer(
        name=(folder or file).resolve().name,
        sha256=sha256,
        vocab_size=_vocab_size(folder, vocabulary),
        bos=None if bos is None else named_token("--bos", bos, vocabulary),
        eos=None if no_eos else _eos(eos, folder, vocabulary),
        library_version=library.__version__,
        _tokenizer=tokenizer,
        _unknown=_unknown(model, vocabulary),
    )


def _locate(path: Path) -> tuple[Path, Path | None]:
    """Return the tokenizer's file, and its folder if the files there belong to it."""
    if path.is_dir():
        file = path / TOKENIZER_FILE
        if file.is_file():
            return file, path
        models = [name for name in _SENTENCEPIECE_FILES if (path / name).is_file()]
        if models:
            raise DataError(
                f"--tokenizer={path}: {models[0]} alone, which is SentencePiece's. Make {TOKENIZER_FILE} of it: "
                "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
            )
        raise DataError(f"--tokenizer={path}: a folder without {TOKENIZER_FILE}. {_GIVE_FAST}")
    if not path.is_file():
        raise DataError(f"--tokenizer={path}: no such file or folder. {_GIVE_FAST}")
    return path, path.parent if path.name == TOKENIZER_FILE else None


def _read(file: Path) -> tuple[str, str]:
    try:
        content = file.read_bytes()
        return content.decode(), hashlib.sha256(content).hexdigest()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--tokenizer={file}: cannot be read ({error}). {_GIVE_FAST}") from None


def _import_tokenizers(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DependencyError(
            f"--tokenizer={path} needs the tokenizers library, which failed to import ({error}). Install '.[text]'."
        ) from None
    return tokenizers


def _eos(token: str | None, folder: Path | None, vocabulary: dict[str, int]) -> SpecialToken:
    return end_of_document(folder, vocabulary) if token is None else named_token("--eos", token, vocabulary)


def _vocab_size(folder: Path | None, vocabulary: dict[str, int]) -> int:
    needed = max(vocabulary.values(), default=-1) + 1
    config = {} if folder is None else read_json(folder / "config.json")
    # Models of several kinds of input keep the language model's sizes by themselves.
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return max([needed, *(size for size in sizes if isinstance(size, int))])


def _unknown(model: dict[str, Any], vocabulary: dict[str, int]) -> int | None:
    """Return the number of the token for unknown text: named by BPE, WordPiece and WordLevel, numbered by Unigram."""
    if isinstance(model.get("unk_id"), int):
        return model["unk_id"]
    token = model.get("unk_token")
    return vocabulary.get(token) if isinstance(token, str) else None
