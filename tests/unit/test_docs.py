"""Every path, config key, command and link in the documents exists, and each check is seen to catch a false one."""

from pathlib import Path

import pytest

from tests.helpers import documents
from tests.helpers.documents import Document

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def written(text: str, path: Path = ROOT / "README.md") -> Document:
    return documents.read_document(path, text)


@pytest.fixture(params=[path for path in DOCUMENTS if path.exists()], ids=lambda path: path.name)
def document(request: pytest.FixtureRequest) -> Document:
    return documents.read_document(request.param, request.param.read_text(encoding="utf-8"))


def test_paths_exist(document: Document):
    assert documents.missing_paths(document, ROOT) == []


def test_config_keys_exist(document: Document):
    assert documents.unknown_keys(document, ROOT) == []


def test_make_targets_exist(document: Document):
    assert documents.unknown_make_targets(document, MAKEFILE) == []


def test_config_names_exist(document: Document):
    assert documents.unknown_config_names(document, ROOT) == []


def test_relative_links_resolve(document: Document):
    assert documents.broken_links(document) == []


@pytest.mark.parametrize(
    "text",
    [
        "See `moe_framework/moe/no_such.py`.",
        "See `tests/no_such/`.",
        "See `tools/*.nothing`.",
        "See `moe_framework/{errors,no_such}.py`.",
        "Start `no_such_script.sh`.",
        "See `no_such.py` there.",
        "See `errors/no_such.py`.",
        "Run\n\n    python tools/no_such.py --x\n",
        "```bash\ncat configs/no_such.yaml\n```",
    ],
)
def test_a_path_that_does_not_exist_is_caught(text: str):
    assert len(documents.missing_paths(written(text), ROOT)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "See `moe_framework/errors.py`, `errors.py`, `config/schema.py`, `tests/`, `moe_framework/*.py`, `Makefile`.",
        "Writes `runs/NAME/metrics.jsonl`, `summary.json` and `config.yaml`; `data.path=/path/to/x.fa.gz`.",
        "The layers `launchers`, `tools`; both `dp/ep` and `and/or`; `tests/unit/…`; `configs/NAME.yaml`.",
        "In prose, moe_framework/moe/no_such.py is not code.",
        "    python /elsewhere/tools/no_such.py",
    ],
)
def test_other_text_is_not_taken_for_a_missing_path(text: str):
    assert documents.missing_paths(written(text), ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        "Set `optim.learnign_rate`.",
        "Set `optim.lr` and `parallel.{dp,pp}`.",
        "Set `train.steps=3`.",
        "    torchrun --nproc_per_node=2 train_fsdp2_ep.py --config-name L0_sanity optim.rate=1",
        "    torchrun --nproc_per_node=2 train_fsdp2_ep.py \\\n        --config-name L0_sanity optimizer.lr=1",
        "```\npython train_fsdp2_ep.py devise=cpu\n```",
        'Run `make sanity ARGS="train.step=3"`.',
    ],
)
def test_a_key_that_the_schema_lacks_is_caught(text: str):
    assert len(documents.unknown_keys(written(text), ROOT)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Set `optim.lr=1e-3`, `parallel.{dp,ep}` or `train.max_steps`; see `optim.py`, `layers.3.moe.x`, `torch.foo`.",
        "    torchrun --nproc_per_node=2 train_fsdp2_ep.py --config-name L0_sanity optim.lr=1 device=cpu",
        "    OMP_NUM_THREADS=1 other_program.py optim.rate=1",
    ],
)
def test_known_keys_and_other_text_pass(text: str):
    assert documents.unknown_keys(written(text), ROOT) == []


@pytest.mark.parametrize("text", ["Run `make no-such`.", "    make setup && make no-such", "```\n$ make no-such\n```"])
def test_a_make_target_that_does_not_exist_is_caught(text: str):
    assert documents.unknown_make_targets(written(text), MAKEFILE) == ["no-such"]


def test_existing_make_targets_and_prose_pass():
    text = "We make no-such claim; `make test` and `make test-slow` run.\n\n    make setup check\n"
    assert documents.unknown_make_targets(written(text), MAKEFILE) == []


def test_a_config_name_without_a_file_is_caught():
    text = "`--config-name L0_sanity`, `--config-name NAME`\n\n    python train_fsdp2_ep.py --config-name L9_none x=1"
    assert documents.unknown_config_names(written(text), ROOT) == ["L9_none"]


@pytest.mark.parametrize("link", ["no_such.md", "docs/no_such.md", "CONTRIBUTING.md#no-such-heading", "#no-such"])
def test_a_broken_link_is_caught(link: str, tmp_path: Path):
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n\n## The proof rule\n")
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\nSee [this]({link}).\n")
    assert documents.broken_links(written(readme.read_text(), readme)) == [link]


def test_links_to_files_headings_and_the_web_pass(tmp_path: Path):
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n\n## The proof rule\n")
    readme = tmp_path / "README.md"
    readme.write_text(
        "# Title\n\n[a](CONTRIBUTING.md) [b](CONTRIBUTING.md#the-proof-rule) [c](#title) [d](https://example.org/x)\n"
    )
    assert documents.broken_links(written(readme.read_text(), readme)) == []


def test_an_indented_continuation_of_a_list_is_prose():
    text = "- one\n    continued with `train.step`\n"
    assert documents.unknown_keys(written(text), ROOT) == ["train.step"]
    assert written(text).blocks == []
