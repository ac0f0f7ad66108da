// Tables scroll inside the page with their head and first column in place; long ones sort by a click
// on a column's head and filter by words.
"use strict";
const LONG = 8;
const UNITS = {k: 1e3, M: 1e6, G: 1e9, T: 1e12};

function numberOf(text) {
  const found = /^[^\d+-]*([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kMGT](?![a-z]))?/.exec(text.replace("−", "-"));
  return found ? parseFloat(found[1].replace(/,/g, "")) * (UNITS[found[2]] || 1) : NaN;
}

function compare(one, other) {
  if (one === "" || other === "") return (one === "") - (other === "");
  const numbers = [numberOf(one), numberOf(other)];
  return numbers.some(Number.isNaN) ? one.localeCompare(other, "en", {numeric: true}) : numbers[0] - numbers[1];
}

function sortBy(table, column, head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  const body = table.tBodies[0], rows = [...body.rows];
  const text = row => row.cells[column].textContent.trim();
  const sign = down ? -1 : 1;
  rows.sort((one, other) => {
    const order = compare(text(one), text(other));
    return text(one) === "" || text(other) === "" ? order : sign * order;  // empty cells stay last
  });
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}

function filter(table, words, count) {
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !parts.every(part => text.includes(part));
    shown += !row.hidden;
  }
  count.value = parts.length ? `${shown} of ${table.tBodies[0].rows.length}` : "";
}

function enrich(table) {
  if (!table.tHead || !table.tBodies.length) return;
  let wrapper = table.closest(".table-wrapper");
  if (!wrapper) {
    wrapper = document.createElement("div");
    wrapper.className = "table-wrapper";
    table.replaceWith(wrapper);
    wrapper.append(table);
  }
  if (table.tBodies[0].rows.length < LONG) return;
  wrapper.classList.add("long-table");
  wrapper.tabIndex = 0;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    head.title = "sort";
    head.onclick = () => sortBy(table, column, head);
    head.onkeydown = event => { if (event.key === "Enter") sortBy(table, column, head); };
  });
  const line = document.createElement("div"), field = document.createElement("input"), count = document.createElement("output");
  line.className = "table-filter";
  field.type = "search";
  field.placeholder = "filter rows";
  field.setAttribute("aria-label", "filter the rows of the table below");
  field.oninput = () => filter(table, field.value, count);
  line.append(field, count);
  wrapper.before(line);
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("article table.docutils").forEach(enrich));
