"""Every key is documented, and a misspelt or foreign name leads to the right one."""

import pytest

from moe_framework.config.keys import names_elsewhere, nearest_key, schema_keys, schema_sections


def test_every_key_has_a_meaning():
    assert [path for path, key in schema_keys().items() if not key.meaning] == []


def test_keys_cover_the_sections_and_the_top_level():
    assert {path.rpartition(".")[0] for path in schema_keys()} == {"", *schema_sections()}


def test_names_of_other_frameworks_point_at_keys_and_are_no_keys():
    assert set(names_elsewhere().values()) <= set(schema_keys())
    own_names = {path.rpartition(".")[2] for path in schema_keys()}
    assert own_names.isdisjoint(names_elsewhere())


def test_every_key_is_its_own_nearest():
    assert {path: nearest_key(path) for path in schema_keys()} == {path: path for path in schema_keys()}


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        ("optim.learnign_rate", "optim.lr"),
        ("batch_size", "train.global_batch_size"),
        ("model.num_local_experts", "model.num_experts"),
        ("train.max_grad_norm", "optim.clip_norm"),
        ("expert_parallel_size", "parallel.ep"),
        ("model.max_position_embeddings", "model.max_positions"),
        ("train.lr", "optim.lr"),
        ("parallal.ep", "parallel.ep"),
        ("checkpnt.every", "checkpoint.every"),
        ("eval.everyy", "eval.every"),
        ("dispatcher.backnd", "dispatcher.backend"),
        ("experts.backnd", "experts.backend"),
        ("optm", "optim"),
        ("optim.lr.value", "optim.lr"),
        ("devise", "device"),
    ],
)
def test_nearest_key_to_a_wrong_one(unknown: str, expected: str):
    assert nearest_key(unknown) == expected


@pytest.mark.parametrize("unknown", ["foo.bar", "zzz", "optim.qqqq", ""])
def test_nothing_is_suggested_for_what_resembles_no_key(unknown: str):
    assert nearest_key(unknown) is None
