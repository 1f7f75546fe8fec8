"""What a Markdown document claims about the repository (paths, keys, commands, links), and which claims are false."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from moe_framework.config.keys import schema_keys, schema_sections

ENTRY = "train_fsdp2_ep.py"

# A path that begins with one of these is the repository's, whether it exists or not.
_TOP_LEVEL = ("moe_framework", "tests", "configs", "tools", "docs", "launchers", ".ci")
_BARE_FILE = r"[\w-]+\.(?:py|sh|sbatch|md|toml)"
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True)
class Document:
    """A Markdown text.

    Attributes:
        path: Where it lies, for its relative links.
        prose: The text outside code blocks.
        spans: Its inline code.
        blocks: Its fenced and indented code blocks, continued lines joined.
    """

    path: Path
    prose: str
    spans: list[str]
    blocks: list[str]

    @property
    def commands(self) -> list[str]:
        """The lines of its code blocks and its inline code."""
        return self.spans + [line.strip() for block in self.blocks for line in block.splitlines()]


def read_document(path: Path, text: str) -> Document:
    """Split a Markdown text into prose, inline code and code blocks."""
    prose: list[str] = []
    blocks: list[list[str]] = []
    fenced, previous_is_code = False, False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        # A list's continuation lines are indented too, but follow a line that is not blank.
        is_indented = line.startswith("    ") and (previous_is_code or not (prose and prose[-1].strip()))
        if is_fence:
            fenced = not fenced
            blocks += [[]] if fenced else []
        elif fenced or is_indented:
            if is_indented and not fenced and not previous_is_code:
                blocks.append([])
            blocks[-1].append(line)
        else:
            prose.append(line)
        previous_is_code = not fenced and not is_fence and is_indented
    joined = "\n".join(prose)
    code = ["\n".join(block).replace("\\\n", " ") for block in blocks]
    return Document(path, joined, re.findall(r"`([^`\n]+)`", joined), code)


def missing_paths(document: Document, root: Path) -> list[str]:
    """Paths in code that look like the repository's and don't exist."""
    tokens = [token for code in document.spans + document.blocks for token in re.split(r"[\s\"'()<>;:|]+", code)]
    claims = {token.rstrip(".,") for token in tokens}
    return sorted(claim for claim in claims if not all(_exists(path, root) for path in expand_braces(claim)))


def _exists(path: str, root: Path) -> bool:
    """Whether a token is no path of the repository, or one that exists; `*` matches."""
    if "…" in path or "..." in path or re.search(r"(^|/)[A-Z_]+($|/|\.(yaml|py)$)", path):
        return True  # an ellipsis or a placeholder such as NAME
    first, slash, _ = path.partition("/")
    if first in _TOP_LEVEL and slash:
        return any(root.glob(path)) if "*" in path else (root / path).exists()
    if re.fullmatch(_BARE_FILE, path):
        return (root / path).exists() or any(any((root / top).rglob(path)) for top in _TOP_LEVEL)
    if re.fullmatch(r"[\w-]+(/[\w-]+)*/[\w-]+\.py", path):
        return (root / path).exists() or (root / "moe_framework" / path).exists()
    return True


def unknown_keys(document: Document, root: Path) -> list[str]:
    """Config keys that the schema doesn't have: dotted ones in inline code, and all on the entry's command lines."""
    claims = {path for span in document.spans for path in _dotted_keys(span)}
    for command in document.commands:
        if ENTRY in command or command.startswith("make sanity"):
            claims |= set(re.findall(r"(?<![\w.\-])\+*([a-z]\w*(?:\.\w+)*)=", command))
    groups = {folder.name for folder in (root / "configs").glob("*") if folder.is_dir()}
    return sorted(claims - set(schema_keys()) - groups)


def _dotted_keys(span: str) -> Iterator[str]:
    """Yield the keys that inline code begins with, such as `optim.lr=1e-3`, `parallel.{dp,ep}` or `optim.lr`."""
    for word in span.split():
        for name in expand_braces(word.split("=")[0].rstrip(".,:;")):
            match = re.fullmatch(r"([a-z]\w*)\.([a-z]\w*(?:\.\w+)*)", name)
            if match and match[1] in schema_sections() and match[2] not in ("py", "md", "yaml", "json"):
                yield name


def unknown_make_targets(document: Document, makefile: str) -> list[str]:
    """Targets that inline code and code blocks call and the Makefile doesn't have."""
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.MULTILINE))
    called = {
        name for command in document.commands for name in re.findall(r"(?:^|&& *|; *|\$ *)make ([a-z][\w-]*)", command)
    }
    return sorted(called - targets)


def unknown_config_names(document: Document, root: Path) -> list[str]:
    """Values of `--config-name` without a file in configs/."""
    named = {name for command in document.commands for name in re.findall(r"--config-name[ =]([\w.-]+)", command)}
    placeholders = {name for name in named if name.isupper() and name.isalpha()}
    return sorted(name for name in named - placeholders if not (root / "configs" / f"{name}.yaml").exists())


def broken_links(document: Document) -> list[str]:
    """Relative links whose file or heading doesn't exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = document.path.parent / file if file else document.path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def expand_braces(text: str) -> list[str]:
    """Return the alternatives of `a.{b,c}` as a shell would: `a.b`, `a.c`."""
    pieces = _BRACES.split(text)
    options = [piece.split(",") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(choice) for choice in product(*options)]
