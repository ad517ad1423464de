"""Every configuration that can be constructed is valid."""

import dataclasses
import re

import numpy as np
import pytest
from messages import refused

from nsa_jax.config import NSAConfig


def test_defaults_are_those_of_the_paper():
    assert dataclasses.asdict(NSAConfig()) == {
        "compression_block_size": 32,
        "compression_stride": 16,
        "selection_block_size": 64,
        "num_selected_blocks": 16,
        "window_size": 512,
        "num_initial_blocks": 1,
        "num_local_blocks": 2,
    }


def test_equal_configs_are_one_static_argument():
    assert NSAConfig(window_size=7) == NSAConfig(window_size=7)
    assert hash(NSAConfig(window_size=7)) == hash(NSAConfig(window_size=7))
    assert NSAConfig(window_size=7) != NSAConfig(window_size=8)


def test_fields_are_frozen_and_named():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NSAConfig().window_size = 1
    with pytest.raises(TypeError, match="positional"):
        NSAConfig(32)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_integers_are_integers(kind):
    config = NSAConfig(window_size=kind(7))

    assert config == NSAConfig(window_size=7)
    assert hash(config) == hash(NSAConfig(window_size=7))
    assert type(config.window_size) is int


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (dict(compression_stride=5), "compression_stride must divide compression_block_size, got 5 and 32"),
        (dict(selection_block_size=72), "compression_stride must divide selection_block_size, got 16 and 72"),
        (dict(compression_stride=64), "compression_stride must divide compression_block_size, got 64 and 32"),
        (dict(compression_block_size=128), "block_size must not exceed selection_block_size, got 128 > 64"),
        (dict(window_size=2**31 - 1), "window_size must be at most 1073741824, got 2147483647"),
        (dict(num_selected_blocks=2), "must cover the initial and local blocks, got 2 < 1 + 2"),
    ],
    ids=lambda x: x.split(",")[0].replace(" ", "_") if isinstance(x, str) else "-".join(x),
)
def test_values_out_of_range_are_one_clear_error(changes, rule):
    with refused(ValueError, re.escape(rule)):
        NSAConfig(**changes)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(compression_block_size=1, compression_stride=1, selection_block_size=1, num_selected_blocks=3),
        dict(compression_block_size=64, compression_stride=64, selection_block_size=64),
        dict(num_selected_blocks=3),
        dict(num_selected_blocks=1, num_initial_blocks=0, num_local_blocks=1, window_size=1),
    ],
    ids=["all_ones", "l_equals_d_equals_l_slc", "forced_blocks_only", "least"],
)
def test_extremes_within_range_are_accepted(sizes):
    NSAConfig(**sizes)
