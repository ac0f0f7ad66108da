"""The generated catalogue of mixers, and the file of measured growth that it reads."""

import json
from pathlib import Path

import pytest

from backbones import list_mixers
from backbones.registry import find_mixer

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def catalogue(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    import catalogue_page

    return catalogue_page


@pytest.mark.parametrize(
    ("name", "order"),
    [("ffn", "N C^2"), ("fnet", "N C"), ("differential", "N^2 C"), ("identity", "none")],
)
def test_orders_of_multiply_adds(catalogue, name, order):
    assert catalogue.order(name) == order


def test_a_row_counts_and_measures(catalogue):
    row = dict(
        zip(
            catalogue.HEAD,
            catalogue.row_of(find_mixer("xca"), {"xca": "N^1"}, {"xca": "3, 2, 1"}),
            strict=True,
        )
    )
    assert row["paper"] == "XCiT (NeurIPS 2021)"
    assert (row["year"], row["kind"], row["bound to the grid"]) == ("2021", "attention", "no")
    assert row["options"] == "`num_heads`, `qkv_bias`"
    assert row["parameters"] == f"{4 * 64 * 64 + 4 * 64 + 1:,}"
    assert (row["MACs, N = 196"], row["time grows as"]) == ("4.82 M", "$N^{1}$")
    assert row["µs per token"] == "3, 2, 1"
    assert row["hosts"].startswith("all ")
    assert catalogue.is_bound(find_mixer("global_filter"))


def test_every_linear_token_mixer_was_measured(catalogue):
    """Run ``python docs/_ext/measure.py tokens`` after adding a token mixer."""
    missing = set(list_mixers("token")) - set(catalogue.measured_exponents())
    assert all(text.count(",") == 2 for text in catalogue.measured_times().values())
    quadratic = {name for name in missing if "N^2" in catalogue.order(name).split()}
    assert missing == quadratic


def test_claims_of_linear_cost_hold():
    """The mixers of linear attention and the scans grow by at most N^1.1 in the last step."""
    file = max(DOCS.glob("measurements/*/token_mixers.json"))
    content = json.loads(file.read_text())
    grown = {row[0].strip("`"): float(row[-1]) for row in content["rows"]}
    claimed = [
        name
        for name in list_mixers("token")
        if ".linear_attention." in find_mixer(name).build.__module__
        or name in ("ss2d", "gated_delta", "bi_wkv", "ttt", "mlstm", "hsm_ssd", "lstm2d", "xca")
    ]
    slow = {name: grown[name] for name in claimed if grown[name] > 1.1}
    assert slow.keys() <= {"retention"}  # along both axes, N^1.5, as its paper says
