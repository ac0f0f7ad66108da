"""Long tables of the site sort, filter and scroll inside; see docs/_static/tables.js."""

import pytest

from tests.browser import CHROMIUM, Browser
from tools.cli.paths import ROOT

NAMES = [f"mixer_with_a_name_as_wide_as_a_phone_{index:02d}" for index in range(12)]
COUNTS = ["1,200", "20.5 M", "", "3", "-1", "2 k", "7", "1e9", "40", "15", "6", "none"]
PAGE = """<!doctype html><link rel="stylesheet" href="{static}/site.css">
<script src="{static}/tables.js"></script>
<body style="width: 300px"><article><table class="docutils"><thead><tr><th>mixer</th><th>count</th>
{more}</tr></thead><tbody>{rows}</tbody></table></article>"""
FIRST = (
    "[...document.querySelectorAll('tbody tr:not([hidden])')].map(row => row.cells[0].innerText)"
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_long_table_sorts_filters_and_keeps_its_first_column(tmp_path):
    more_cells = "<td>some_more</td>" * 9
    rows = "".join(
        f"<tr><td>{name}</td><td>{count}</td>{more_cells}</tr>"
        for name, count in zip(NAMES, COUNTS, strict=True)
    )
    file = tmp_path / "page.html"
    file.write_text(
        PAGE.format(static=ROOT / "docs/_static", rows=rows, more="<th>a_further_column</th>" * 9)
    )
    browser = Browser(tmp_path / "profile")

    def shown():
        return browser.value(f"{FIRST}.join(' ')").split()

    try:
        browser.open(file.as_uri())
        browser.wait("document.querySelectorAll('.long-table').length == 1")
        browser.value("document.querySelectorAll('th')[1].click()")
        numbers = [4, 3, 10, 6, 9, 8, 0, 5, 1, 7]
        order = [int(name[-2:]) for name in shown()]
        assert [index for index in order if index in numbers] == numbers
        assert order[-1] == 2  # the empty cell
        browser.value("document.querySelectorAll('th')[1].click()")
        order = [int(name[-2:]) for name in shown()]
        assert [index for index in order if index in numbers] == numbers[::-1]
        assert order[-1] == 2
        browser.value(
            "const field = document.querySelector('.table-filter input'); field.value = '_1 m';"
            "field.dispatchEvent(new Event('input'))"
        )
        assert set(shown()) == set(NAMES[10:])
        assert browser.value("document.querySelector('.table-filter output').value") == "2 of 12"
        left = "document.querySelector('td').getBoundingClientRect().left"
        before = browser.value(left)
        browser.value("document.querySelector('.long-table').scrollLeft = 500")
        assert browser.value("document.querySelector('.long-table').scrollLeft") > 100
        assert browser.value(left) == pytest.approx(before, abs=2)
        phone = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.call("Emulation.setDeviceMetricsOverride", **phone)
        assert browser.value("document.querySelector('td').offsetWidth") <= 160
    finally:
        browser.close()
