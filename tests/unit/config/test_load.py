"""YAML and command line are composed as documented, and every mistake in them is reported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_framework.config.load import help_for, load_config, to_dict, to_yaml
from moe_framework.config.schema import Config
from moe_framework.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a YAML file into a folder of configurations and returns the folder."""

    def write_file(text: str, name: str = "mine") -> Path:
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write_file


def violations_of(*arguments, **keywords) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments, **keywords)
    return caught.value.violations


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_shipped_configuration_loads(name: str):
    assert isinstance(load_config(name, [], CONFIGS), Config)


def test_defaults_yaml_adds_nothing_to_the_dataclasses():
    assert load_config("defaults", [], CONFIGS) == Config()


def test_command_line_beats_yaml_beats_dataclass(write: Callable[..., Path]):
    folder = write("optim: {lr: 0.5, eps: 0.25}")
    optim = load_config("mine", ["optim.lr=0.125"], folder).optim
    assert (optim.lr, optim.eps, optim.beta1) == (0.125, 0.25, Config().optim.beta1)


@pytest.mark.parametrize("override", ["eval.max_rows=3", "+eval.max_rows=3", "++eval.max_rows=3", "eval={max_rows: 3}"])
def test_key_that_the_yaml_lacks_can_be_set(override: str):
    assert load_config("L0_sanity", [override], CONFIGS).eval.max_rows == 3


def test_last_of_several_overrides_wins():
    assert load_config("L0_sanity", ["optim.lr=1", "optim.lr=2"], CONFIGS).optim.lr == 2.0


def test_deleted_key_falls_back_to_the_dataclass():
    assert load_config("L0_sanity", ["~optim.lr"], CONFIGS).optim.lr == Config().optim.lr


@pytest.mark.parametrize("text", ["007", "1e3", "1_000"])
def test_text_that_looks_like_a_number_stays_as_typed(text: str):
    assert load_config("L0_sanity", [f"run.name={text}"], CONFIGS).run.name == text


def test_interpolation_sees_defaults_that_the_yaml_lacks(write: Callable[..., Path]):
    folder = write("optim:\n  warmup_steps: ${train.max_steps}\n")
    assert load_config("mine", ["train.max_steps=7"], folder).optim.warmup_steps == 7
    assert load_config("mine", [], folder).optim.warmup_steps == Config().train.max_steps


def test_own_folder_builds_on_the_projects_configurations(write: Callable[..., Path]):
    folder = write("defaults: [L0_sanity, _self_]\nrun: {name: mine}\n")
    config = load_config("mine", [], CONFIGS, folder)
    assert config.run.name == "mine"
    assert config.model == load_config("L0_sanity", [], CONFIGS).model


def test_own_folder_is_looked_up_first_for_the_name(write: Callable[..., Path]):
    folder = write("run: {name: other}", "L0_sanity")
    assert load_config("L0_sanity", [], CONFIGS, folder).run.name == "other"
    assert load_config("defaults", [], CONFIGS, folder) == Config()


def test_project_configuration_takes_a_group_of_the_own_folder(write: Callable[..., Path]):
    folder = write("num_layers: 3", "model/small")
    assert load_config("L0_sanity", ["+model=small"], CONFIGS, folder).model.num_layers == 3


def test_folder_name_with_spaces_and_equals_signs(tmp_path: Path):
    odd = tmp_path / 'a b=c, "d"'
    odd.mkdir()
    (odd / "base.yaml").write_text("run: {name: odd}")
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\n")
    assert load_config("mine", [], odd, tmp_path).run.name == "odd"


def test_group_choice_is_composed(write: Callable[..., Path]):
    write("num_layers: 3", "model/small")
    write("num_layers: 5", "model/large")
    folder = write("defaults: [{model: small}, _self_]\n")
    assert load_config("mine", [], folder).model.num_layers == 3
    assert load_config("mine", ["model=large"], folder).model.num_layers == 5
    assert load_config("mine", ["model={num_layers: 7}"], folder).model.num_layers == 7
    assert violations_of("mine", ["model=huge"], folder) == ["model=huge must be one of large, small."]
    assert "Group model=NAME: large, small" in help_for(folder)


def test_saved_yaml_loads_as_the_same_configuration(write: Callable[..., Path]):
    overrides = ["run.name='1e-4'", "data.path='null'", "optim.lr=1e-30", "model.head_dim=32", "run.dir='a: b #c'"]
    config = load_config("L0_sanity", overrides, CONFIGS)
    folder = write(to_yaml(config), "config")
    assert load_config("config", [], folder) == config
    assert to_dict(config)["run"] == {"name": "1e-4", "dir": "a: b #c"}


def test_composing_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    load_config("L0_sanity", ["optim.lr=1"], CONFIGS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learnign_rate=1", "optim.learnign_rate=1: unknown key. Did you mean optim.lr?"),
        ("+optim.learnign_rate=1", "optim.learnign_rate=1: unknown key. Did you mean optim.lr?"),
        ("optim={learnign_rate: 1}", "optim.learnign_rate=1: unknown key. Did you mean optim.lr?"),
        ("moe.aux_loss=foo", "moe.aux_loss=foo must be one of sequence, global_batch, none."),
        ("~foo", "~foo: unknown key. See --help for all keys."),
        ("optim.lr=1,2", "optim.lr=1,2: several values are a sweep"),
        ("train.seed=range(1,3)", "several values are a sweep"),
        ("hydra.run.dir=x", "hydra.run.dir=x: Hydra only composes the configuration here"),
        ("L0_sanity", "L0_sanity: not an override. Write KEY=VALUE"),
        ("checkpoint.ckpt_dir=/x/lr=1", "quote it: 'checkpoint.ckpt_dir=\"/x/lr=1\"'"),
        ("optim.lr=${nope}", "optim.lr=${nope}: cannot be resolved (Interpolation key 'nope' not found)"),
        ("run.dir=${oc.env:SURELY_NOT_SET}", "Environment variable 'SURELY_NOT_SET' not found"),
        ("optim.lr=???", "optim.lr=??? must be set"),
        ("model.num_layers=02", "model.num_layers=02 must be a whole number. Write 2."),
        ("optim=3", "optim=3 must be a section with keys"),
        ("~optim.eps", "cannot be composed (Could not delete from config. 'optim.eps' does not exist.)"),
    ],
)
def test_wrong_override_is_one_violation(override: str, message: str):
    (violation,) = violations_of("L0_sanity", [override], CONFIGS)
    assert message in violation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lr: [", "--config-name=mine: not valid YAML (while parsing"),
        ("optim:\n\tlr: 1\n", "not valid YAML"),
        ("optim: {lr: 1, lr: 2}", "duplicate key lr"),
        ("- 1\n", "must be a DictConfig, got ListConfig"),
        ("defaults: [nope]\n", "Could not load 'nope'"),
        ("defaults: 3\n", "defaults must be a list"),
        ("x: ${y\n", "no viable alternative at input '${y'"),
        ("optim:\n", "optim=null must be a section with keys"),
        ("optim: [1]\n", "optim=[1] must be a section with keys"),
        ("optim:\n  lr: ???\n", "optim.lr=??? must be set"),
        ("model: ???\n", "model=??? must be set"),
        ("optim: {lr: '${train.nope}'}\n", "optim.lr=${train.nope}: cannot be resolved"),
        ("optim: {lr: '${optim.lr}'}\n", "Recursive interpolation detected"),
        ("optm: {lr: 1}\n", "optm.lr=1: unknown key. Did you mean optim.lr?"),
        ("run: {name: 7}\n", "run.name=7 must be text. Put it in quotes."),
    ],
)
def test_wrong_yaml_is_one_violation(write: Callable[..., Path], text: str, message: str):
    (violation,) = violations_of("mine", [], write(text))
    assert message in violation


def test_yaml_that_is_not_utf8_is_a_violation(tmp_path: Path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe")
    assert "codec can't decode" in violations_of("mine", [], tmp_path)[0]


def test_violations_of_yaml_and_command_line_are_reported_together(write: Callable[..., Path]):
    folder = write("optim: {lr: fast}\nmodel: {n_layers: 2}\n")
    assert len(violations_of("mine", ["a=b=c", "device=tpu", "foo.bar=1", "optim.lr=1,2"], folder)) == 6


def test_unknown_configuration_name_lists_the_known_ones():
    (violation,) = violations_of("L0_sanit", [], CONFIGS)
    assert "--config-name=L0_sanit: no such file" in violation
    assert "Did you mean L0_sanity?" in violation
    assert "Available: " in violation


def test_missing_configuration_name_is_reported_with_wrong_overrides():
    violations = violations_of(None, ["optim.learnign_rate=1"], CONFIGS)
    assert any("--config-name is missing" in violation and "L0_sanity" in violation for violation in violations)
    assert any("Did you mean optim.lr?" in violation for violation in violations)


def test_configuration_name_with_ending_is_accepted_and_a_path_is_not():
    assert load_config("L0_sanity.yaml", [], CONFIGS) == load_config("L0_sanity", [], CONFIGS)
    assert violations_of("x/y/L0.yaml", [], CONFIGS) == [
        "--config-name=x/y/L0.yaml is a path. Write --config-dir x/y --config-name L0."
    ]


def test_missing_folder_is_a_violation(tmp_path: Path):
    assert "no such folder" in violations_of("L0_sanity", [], CONFIGS, tmp_path / "nope")[0]
