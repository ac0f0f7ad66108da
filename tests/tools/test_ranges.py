"""Absurd numbers are rejected at once in all options."""

import pytest

from tools.cli.arguments import parse_grid, parse_image_size, parse_integer
from tools.cli.ranges import RANGES, check_ranges, find_range
from tools.cli.typed_network import read_networks
from tools.config import overrides

ABSURD = [10**20, -(10**20), 10**29, 1e300]


@pytest.mark.parametrize("key", [*RANGES, "backbone.depth", "backbone.mixer.rank"])
def test_every_range_rejects_absurd_values(key):
    least, most = find_range(key)
    check_ranges({key: [least, most]})
    for value in (*ABSURD, most + 1):
        with pytest.raises(ValueError, match=rf"^{key}=.* is out of range; pass a number from"):
            check_ranges({key: value})


def test_numbers_without_a_range_fit_into_64_bits():
    check_ranges({"a": {"b": [1, 2**63 - 1, 1e300]}, "seed": True, "c": "1e400", "d": None})
    for value in (2**63, -(2**63) - 1, [1, [10**30]], 10**6000):
        with pytest.raises(ValueError, match=r"^a\.b=.* is out of range; pass a number from"):
            check_ranges({"a": {"b": value}})
    with pytest.raises(ValueError, match=r"image_size=16385 is out of range; .* 1 to 16,384$"):
        check_ranges({"data": {"image_size": 16_385}})
    with pytest.raises(ValueError, match=r"backbone\.patch_size=100000000 is out of range"):
        read_networks("deit_t", ["backbone.patch_size=100000000"])
    with pytest.raises(ValueError, match="too many"):
        read_networks("deit_t", ["backbone.patch_size=range(1,inf)"])


@pytest.mark.parametrize("text", ["100000000", "1" * 30, "9" * 5000])
def test_arguments_of_commands(text):
    for key in ("images", "batch", "size", "workers", "seed", "threads"):
        with pytest.raises(ValueError, match=rf"^{key} must be a whole number from 1 to .*; got"):
            parse_integer(key, text + "0" * 5)
    with pytest.raises(ValueError, match=r"image_size must be .* and 16,384; got '.*'"):
        parse_image_size(text)
    with pytest.raises(ValueError, match=r"grid must be .* up to 16,384; got '.*'"):
        parse_grid(f"14x{text}")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["seed=range(0,inf)"], r"seed=range\(0,inf\) makes too many .* 10,000"),
        (["seed=range(100000000)"], "makes 100,000,000 combinations"),
        (["seed=shuffle(range(100000000))"], "makes 100,000,000 combinations"),
        (["optimizer.lr=range(0.0,1.0,1e-9)"], "makes 1,000,000,000 combinations"),
        (["optimizer.lr=range(0.0,1.0,0.0)"], "too many"),
        (["seed=range(200)", "optimizer.lr=range(1,100)"], "makes 19,800 combinations"),
        (["seed=range(1e308,-1e308,-1e-300)"], "too many"),
        (["seed=interval(0,1)"], r"seed=interval\(0,1\) makes too many"),
        ([f"seed={','.join(['1234'] * 10_001)}"], r"^.{,120} makes 10,001 combinations"),
        (["seed=range(5,0)"], r"seed=range\(5,0\) must have at least one value"),
        (["data=glob(nothing*)"], "must have at least one value"),
        (["seed=range(200)", "backbone=glob(*)"], "combinations of values; pass at most 10,000"),
    ],
)
def test_sweeps_are_counted_before_they_are_made(typed, message):
    with pytest.raises(ValueError, match=message):
        overrides.read_command(["-m", *typed])


def test_a_sweep_prints_its_number_of_runs(capsys):
    overrides.read_command(["-m", "seed=range(0,100)", "optimizer.lr=1e-3,1e-4"])
    overrides.read_command(["-m", "backbone=deit_t"])
    assert capsys.readouterr().out == "Sweep of 200 runs\nSweep of 1 run\n"
