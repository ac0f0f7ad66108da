"""The HTML page of a run: well-formed, self-contained, with what the run holds."""

import csv
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from PIL import Image

from tasks.engine.family import find_family
from tools import analyse
from tools.analyses import Analysis, Findings, analyses, page


class Page(HTMLParser):
    """Collects references, anchors, headings and cells; checks that elements close in order."""

    ALONE = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.references, self.anchors, self.open = [], [], []
        self.headings, self.cells = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.references += [v for k, v in attributes if k in ("src", "href", "srcset", "data")]
        self.anchors += [v for k, v in attributes if k == "id"]
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        place = self.open[-1] if self.open else ""
        if place == "h2":
            self.headings.append(data)
        elif place in ("td", "th"):
            self.cells.append(data)


def parse_page(text):
    """Parse a page, and check that it is self-contained and its table of contents valid."""
    found = Page(text)
    pictures = [one for one in found.references if not one.startswith("#")]
    assert pictures
    assert all(one.startswith("data:image/png;base64,") for one in pictures)
    inside = [one[1:] for one in found.references if one.startswith("#")]
    assert inside == found.anchors
    assert not re.search(r"@import|url\(|<script|<link|<iframe", text)
    return found


def wide_analysis(subjects, options):
    """A table wider than a narrow window, and two figures."""
    from tools.analyses.figures import curves

    values = {f"a_rather_long_name_{i}": 1 / (i + 3) for i in range(12)}
    columns = {key: (key, "{:.4f}") for key in values} | {"backbone": ("backbone", "{}")}
    rows = [{"backbone": "net", **values}]
    figures = {name: curves({"net": [1.0, 2.0]}, name, "y") for name in ("one", "two_three")}
    return Findings(rows, rows, columns, figures, ["a <note>"])


def refusing_analysis(subjects, options):
    raise ValueError("net <has> none of it")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The page of a hand-written run folder, with two analyses."""
    kinds = {
        "wide": Analysis("wide", "Wide tables (Fig. 1; b)", {}, {}, wide_analysis),
        "not": Analysis("not", "Nothing: at all", {}, {}, refusing_analysis),
    }
    monkeypatch.setattr(page, "analyses", lambda: kinds)
    folder = tmp_path / "run"
    (folder / "preview").mkdir(parents=True)
    for name in ("00", "01"):
        Image.new("RGB", (900, 300), "teal").save(folder / "preview" / f"{name}.png")
    Image.new("RGB", (1500, 400), "white").save(folder / "curves.png")
    (folder / "config.yaml").write_text("task_name: classification\nlong: " + "x" * 300 + "\n")
    with (folder / "classes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("class", "IoU"), ("a<b", 0.123456), ("c", "")])
    metrics = {"top1": 74.123456, "top5": 91.0, "loss": 1.0}
    paper = {
        "row": "AFBO Table 2",
        "why_not": "9 epochs instead of 300",
        "metrics": {
            "top1": {"paper": 74.6, "ours": 74.123456},
            "top5": {"paper": 92.0000001, "ours": 91.0, "difference": -1.0000001},
        },
    }
    summary = {
        "task": "classification", "metrics": metrics, "paper": paper, "parameters": 5_700_000,
        "backbone_parameters": 5_500_000, "backbone_macs": 1.23e9, "macs_at": [64, 96],
        "seconds": 61.0, "overrides": ["task=classification", "x='a b'"],
        "data": {"name": "datamodules.x.Images", "samples": {"train": 1234}},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def read_page(folder):
    family = find_family("classification")
    subject = SimpleNamespace(label="net<1>", folder=folder, family=family, count=3, size=None)
    return page.page(subject, {"images": "16"}, lambda line: None)


def test_content_of_the_page_of_a_finished_and_an_unfinished_run(written):
    text = read_page(written)
    found = parse_page(text)
    assert found.headings == ["Results", "Curves", "Predictions", "Wide tables",
                              "Analyses that do not apply", "Settings"]  # fmt: skip
    assert '<meta name="viewport"' in text
    assert "net&lt;1&gt;" in text
    assert "Fig. 1; b · <code>python tools/analyse.py wide ckpt=RUN</code>" in text
    assert "1,234 for train" in text
    cells = found.cells
    assert cells[cells.index("not") + 1] == "net <has> none of it"
    assert "0.3333" in cells
    assert "backbone" not in cells  # there is only one network
    at = cells.index("difference") + 1
    assert cells[at : at + 8] == ["top1", "74.6", "74.12", "-", "top5", "92", "91", "-1"]
    assert "9 epochs instead of 300" in text
    at = cells.index("IoU") + 1
    assert cells[at : at + 4] == ["a<b", "0.1235", "c", "-"]
    assert cells[cells.index("parameters") + 1] == "5.70 M (backbone 5.50 M)"
    assert "<p>a &lt;note&gt;</p>" in text
    assert "python tools/run.py task=classification &#x27;x=" in text
    assert "two three" in text
    (written / "summary.json").unlink()
    (written / "curves.png").unlink()
    text = read_page(written)
    assert "The results follow" in text
    assert "None were measured" in text
    parse_page(text)


@pytest.mark.slow
def test_the_page_of_a_real_run(reported, tmp_path):
    """Written at the end of a training, and again by the command."""
    text = (reported / "report.html").read_text()
    found = parse_page(text)
    refused = {"relations", "activations"}
    drawn = set(analyses()) - refused - {"report"}
    assert drawn < set(found.anchors)
    assert not refused & set(found.anchors)
    assert "deit_t lacks a matrix over tokens" in text
    pictures = sum(one.startswith("data:") for one in found.references)
    assert pictures > 10
    out = tmp_path / "again"
    assert analyse.main(["report", f"ckpt={reported}", "only=entropy", f"out={out}"]) == 0
    assert "Feature entropy" in (out / "report.html").read_text()
