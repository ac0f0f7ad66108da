// A click on a heading of a table in a container "sortable" sorts its rows, another one reverses.
document.addEventListener("DOMContentLoaded", () => {
  const number = (text) => parseFloat(text.replace(/,/g, ""));
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
  };
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    table.querySelectorAll("thead th").forEach((heading, column) => {
      const sort = () => {
        const rising = heading.getAttribute("aria-sort") !== "ascending";
        table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const text = (row) => row.cells[column].textContent.trim();
        const rows = [...body.rows].sort((a, b) => {
          if (!text(a) || !text(b)) return !text(a) - !text(b); // empty cells stay below
          return rising ? compare(text(a), text(b)) : compare(text(b), text(a));
        });
        body.append(...rows);
      };
      heading.tabIndex = 0;
      heading.addEventListener("click", sort);
      heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
});
