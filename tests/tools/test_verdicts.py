"""Printed counts of papers against ours: verdicts and causes of differences."""

import json
from decimal import Decimal

import pytest
import torch

from backbones import create_backbone
from backbones.mixers.afbo import GroupedCrossMapping
from tools.complexity import count_model
from tools.papers.published import Printed, list_papers, load_rows

BASES = {
    row.backbone: (row.params, row.exact_macs)
    for row in load_rows("afbo", "classification")
    if not row.options
}


def rounds_to_digits(exact, unit, printed, change):
    """Return True if an exact count, rounded or truncated, has the printed digits."""
    digits = 10 ** len(printed.partition(".")[2])
    wanted, size = int(printed.replace(".", "")), abs(exact) * digits
    rounded = (2 * size + unit) // (2 * unit)
    sign = -1 if exact < 0 else 1
    return wanted == sign * rounded or (not change and wanted == sign * (size // unit))


# Numbers of rows that agree, rows with explained differences only, and other rows.
VERDICTS = {"afbo": (44, 22, 72), "ffnet": (12, 9, 0), "iffn": (33, 1, 10), "posmlp": (9, 14, 8),
            "sbm": (10, 12, 11)}  # fmt: skip


@pytest.mark.parametrize("paper", list_papers())
def test_verdicts_depend_on_the_printed_digits_only(paper):
    found = [0, 0, 0]
    for row in load_rows(paper):
        base = BASES.get(row.base)
        ours = {"params": (row.params, 10**6), "flops": (row.exact_macs, 10**9)}
        differing = []
        for index, (name, (exact, unit)) in enumerate(ours.items()):
            printed = row.printed(name)
            if printed is None or exact is None:
                continue
            change = f"{name}_delta" in row.reported
            exact -= base[index] if change else 0
            if not rounds_to_digits(exact, unit, printed.text, change):
                differing.append(name)
        residuals = row.residuals(row.params, row.exact_macs, base)
        verdict = row.verdict(residuals)
        assert row.mismatches(residuals) == differing, row
        assert (verdict == "agrees") == (not differing), row
        assert set(row.cause) <= set(differing), f"{row}: cause needs a difference"
        assert ("DIFFERS" in verdict) == bool(set(differing) - set(row.cause)), row
        assert row.note or not row.cause, f"{row} needs a note"
        if residuals:
            found[2 if "DIFFERS" in verdict else verdict != "agrees"] += 1
    assert tuple(found) == VERDICTS[paper]


@pytest.mark.parametrize(
    ("printed", "exact", "change", "agrees"),
    [("5.70", "5.699", False, True), ("5.70", "5.69", False, False), ("5.7", "5.69", False, True),
     ("5.7", "5.799", False, True), ("5.7", "5.8", False, False), ("5.7", "5.65", False, True),
     ("5.7", "5.6499", False, False), ("60", "59.5", False, True), ("60.0", "59.5", False, False),
     ("-0.2", "-0.29", True, False), ("-0.3", "-0.29", True, True), ("+0.0", "-0.04", True, True),
     ("+0.1", "0.05", True, True)],
)  # fmt: skip
def test_printed_digits(printed, exact, change, agrees):
    assert Printed(printed).is_printed_for(Decimal(exact), change=change) is agrees
    number = round(Decimal(exact) * 10**6)
    assert rounds_to_digits(int(number), 10**6, printed, change) is agrees


def test_verdicts_of_published_and_other_counts():
    """From g2=3 to g2=2 the printed count falls by 0.2 M and ours by 0.29 M."""
    rows = [row for row in load_rows("afbo") if row.table == 7]
    three, two = (row for row in rows if row.options["mixer"]["g2"] in (2, 3))
    assert round(two.reported["params"] - three.reported["params"], 1) == -0.2
    assert two.params - three.params == -294912
    assert two.verdict(two.residuals(two.params, two.exact_macs)) == "DIFFERS by -0.13 M"
    assert "ours by 0.29 M" in two.note
    rows = {(row.table, str(row)): row for row in load_rows("posmlp", "classification")}
    row = rows[2, "posmlp_t backbone.img_size=384 image_size=384"]
    assert row.reported["flops"] == 17.7
    ours = row.residuals(row.params, row.exact_macs)
    assert row.verdict(ours) == "DIFFERS by -1.64 G"
    assert row.verdict({"params": Decimal(0), "flops": Decimal(0)}) == "agrees"
    known = rows[2, "gmlp_b"]
    ours = known.residuals(known.params, known.exact_macs)
    assert known.verdict(ours) == "differs by -0.08 G: counting by fvcore"
    assert known.verdict(ours, as_published=False) == "DIFFERS by -0.08 G"


def test_rounding_explains_counts_with_this_cause():
    """Such counts are rounded to whole millions or are sums of two rounded counts."""
    found = 0
    for paper in list_papers():
        rows = load_rows(paper)
        networks = {(row.backbone, row.head): row.params for row in rows if not row.options}
        for row in rows:
            if row.cause.get("params") != "rounding":
                continue
            found += 1
            printed = Decimal(row.printed("params").text)
            if printed == int(printed) and "sum of" not in row.note:
                assert printed in (row.params // 10**6, round(row.params / 1e6)), row
                continue
            base = networks[row.backbone.rpartition("_")[0], row.head]
            parts = (Decimal(base) / 10**6, Decimal(row.params - base) / 10**6)
            assert sum(round(part, 1) for part in parts) == printed, row
    assert found > 5


def test_frozen_layers_explain_the_paper_s_resnets():
    for name in ("resnet18", "resnet50"):
        with torch.device("meta"):
            frozen = create_backbone(name, dense=True, frozen_stages=1)
        num_frozen = sum(p.numel() for p in frozen.parameters() if not p.requires_grad)
        rows = [row for row in load_rows("afbo", "detection") if row.backbone == name]
        assert {row.cause["params"] for row in rows} == {"counting"}
        for row in rows:
            counted = Decimal(row.params - num_frozen) / 10**6
            assert row.printed("params").is_printed_for(counted), row


@pytest.mark.slow
def test_counting_rules_named_as_causes_give_the_printed_digits():
    found = 0
    for row in load_rows("posmlp", "classification") + load_rows("sbm", "classification"):
        rule = row.cause.get("flops", "").partition(" by ")[2]
        if rule:
            found += 1
            size = (row.image_size, row.image_size)
            _, macs = count_model(row.backbone, json.dumps(row.options), size, rule)
            assert row.printed("flops").is_printed_for(Decimal(macs) / 10**9), row
    own = ("poolformer_m48", 2)
    (pool,) = (row for row in load_rows("afbo") if (row.backbone, row.table) == own)
    _, macs = count_model("poolformer_m48", "{}", (224, 224), "torchprofile")
    assert pool.cause == {"flops": "counting by torchprofile"}
    assert pool.printed("flops").is_printed_for(Decimal(macs) / 10**9)
    assert found == 13


def gccm_macs_saved(name, options):
    """Return the multiply-adds saved by counting GCCM's weights once."""
    with torch.device("meta"):
        backbone, saved = create_backbone(name, **options).eval(), []

    def record_savings(mapping, given, _):
        again = len(mapping.blocks) - len(mapping.weight)
        tokens = given[0].numel() // given[0].shape[-1]
        saved.append(again * mapping.weight[0].numel() * tokens)

    for module in backbone.modules():
        if isinstance(module, GroupedCrossMapping):
            module.register_forward_hook(record_savings)
    backbone.embed(torch.zeros(1, 3, 224, 224, device="meta"))
    return sum(saved)


def shares_weights(row):
    return row.task == "classification" and row.backbone.endswith(("_afbo", "_scfbo_gc"))


COUNTED_ONCE = [row for row in load_rows("afbo") if shares_weights(row) and row.printed("flops")]
BIG = ("deit_b", "deit_s", "swin", "poolformer_s36", "poolformer_m", "visionllama")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.name or f"{row.table}-{row}",
            marks=pytest.mark.slow if row.backbone.startswith(BIG) or row.table != 2 else (),
        )
        for row in COUNTED_ONCE
    ],
)
def test_counting_weights_once_is_a_cause_if_it_gives_the_printed_digits(row):
    change = "flops_delta" in row.reported
    base = BASES[row.base] if change else (0, 0)
    macs = row.exact_macs - base[1] - gccm_macs_saved(row.backbone, row.options)
    once = Decimal(macs) / 10**9
    is_explained = row.printed("flops").is_printed_for(once, change=change)
    found = row.residuals(row.params, row.exact_macs, base if change else None)
    if "flops" in row.mismatches(found):
        assert (row.cause.get("flops") == "counting") == is_explained
    if "counted once" in row.note:
        printed = Decimal(row.printed("flops").text)
        off = once - (-printed if "can only be meant as +" in row.note else printed)
        assert f"{off:+.2f} G" in row.note


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("table: 1, task: classification, reported: {params: 5.70}, params: 1",
         r'row 1: reported.params must be text .* "5.70"; got 5.7'),
        ("table: 1, task: classification, reported: {}, params: 1, cause: {params: weather}",
         r"row 1: cause must be one of misprint, .*'weather'"),
        ("tabel: 2", r"some\.yaml, row 1: got an unexpected .*'tabel'"),
    ],
)  # fmt: skip
def test_wrong_rows_are_rejected(row, said, tmp_path, monkeypatch):
    (tmp_path / "some.yaml").write_text(f"rows:\n  - {{backbone: x, {row}}}\n")
    monkeypatch.setattr("tools.papers.published.PUBLISHED", tmp_path)
    with pytest.raises(ValueError, match=said):
        load_rows("some")
    with pytest.raises(ValueError, match="paper must be one of some; got 'other'"):
        load_rows("other")
