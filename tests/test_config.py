"""Every mistake in an option is refused by name, and every config survives the way to a dict and back."""

from __future__ import annotations

import dataclasses

import pytest

from tiered_kv import TieredKVConfig
from tiered_kv.config import _LEAST

FIELDS = {field.name: str(field.type) for field in dataclasses.fields(TieredKVConfig)}


def test_defaults_are_valid():
    assert TieredKVConfig().token_budget == 2048


def test_is_keyword_only():
    with pytest.raises(TypeError):
        TieredKVConfig(1024)  # type: ignore[misc]


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TieredKVConfig().token_budget = 1  # type: ignore[misc]


def test_equal_options_make_equal_hashable_configs():
    assert len({TieredKVConfig(), TieredKVConfig(), TieredKVConfig(window_size=65)}) == 2


def test_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="token_bugdet"):
        TieredKVConfig(token_bugdet=1)  # type: ignore[call-arg]


def test_from_dict_names_the_unknown_option_and_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown option 'token_bugdet': expected one of .*token_budget"):
        TieredKVConfig.from_dict({"token_bugdet": 1})


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_type_is_refused(name):
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got \[\] of type list"):
        TieredKVConfig(**{name: []})


@pytest.mark.parametrize("name", [name for name, kind in FIELDS.items() if "bool" not in kind])
def test_a_bool_is_no_number(name):
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got True of type bool"):
        TieredKVConfig(**{name: True})


@pytest.mark.parametrize("name", [name for name, kind in FIELDS.items() if "int" in kind])
def test_a_float_is_no_count(name):
    with pytest.raises(TypeError, match=rf"^{name}: expected int.*, got 64\.0 of type float"):
        TieredKVConfig(**{name: 64.0})


@pytest.mark.parametrize("name", [name for name, kind in FIELDS.items() if "float" in kind])
def test_a_whole_number_is_a_float(name):
    assert getattr(TieredKVConfig(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", [name for name, kind in FIELDS.items() if "None" not in kind])
def test_none_is_refused_where_it_means_nothing(name):
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got None of type NoneType"):
        TieredKVConfig(**{name: None})


@pytest.mark.parametrize(("name", "least"), _LEAST.items())
def test_too_small_a_number_is_refused(name, least):
    below = least - (1 if "int" in FIELDS[name] else 0.5)
    with pytest.raises(ValueError, match=rf"^{name}: expected at least {least}, got {below}"):
        TieredKVConfig(**{name: below})


def test_an_infinite_size_is_refused():
    with pytest.raises(ValueError, match=r"^gpu_cache_size: expected a finite number, got inf"):
        TieredKVConfig(gpu_cache_size=float("inf"))


@pytest.mark.parametrize("name", [name for name, kind in FIELDS.items() if "float" in kind])
def test_not_a_number_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}: .*nan"):
        TieredKVConfig(**{name: float("nan")})


@pytest.mark.parametrize("name", ["policy", "index_dtype"])
def test_unknown_choice_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}: expected one of \w+, \w+.*, got 'fifo'"):
        TieredKVConfig(**{name: "fifo"})


def test_spread_is_a_share():
    with pytest.raises(ValueError, match=r"^spread: expected a share between 0 and 1, got 1\.5"):
        TieredKVConfig(spread=1.5)


@pytest.mark.parametrize(
    ("small", "large", "options"),
    [
        ("tokens_per_cluster", "max_cluster_tokens", {"tokens_per_cluster": 80}),
        ("max_cluster_tokens", "token_budget", {"token_budget": 63}),
        ("tokens_per_cluster", "decode_segment", {"decode_segment": 15}),
        ("decode_segment", "prefill_segment", {"prefill_segment": 300}),
    ],
)
def test_contradicting_options_are_refused(small, large, options):
    with pytest.raises(ValueError, match=rf"^{small}: expected at most {large} = \d+, got \d+"):
        TieredKVConfig(**options)


def test_dense_until_is_the_budget_unless_told():
    assert TieredKVConfig(token_budget=512).dense_until == 512
    assert TieredKVConfig(token_budget=512, dense_context=0).dense_until == 0


def test_the_cluster_cache_holds_at_least_a_selection():
    config = TieredKVConfig(token_budget=1000, gpu_cache_size=1.0)
    assert config.num_slots >= config.max_selected_blocks >= 1000 / config.block_size


def test_to_dict_and_from_dict_are_inverse():
    config = TieredKVConfig(token_budget=777, policy="lfu", dense_context=3, pin_memory=False, spread=0.25)
    assert TieredKVConfig.from_dict(config.to_dict()) == config


def test_every_option_is_described():
    described = TieredKVConfig.__doc__ or ""
    assert [name for name in FIELDS if f" {name}:" not in described] == []
