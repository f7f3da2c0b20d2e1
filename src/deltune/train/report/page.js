// Sorts the rows of each group of a table: up, down, and as they were. What has no value stays last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  for (const body of table.tBodies) [...body.rows].forEach((row, i) => { row.first = i; });
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")];
    for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", next);
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const compare = (a, b) => {
      if (next === "none") return a.first - b.first;
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "") || a.first - b.first;
      const order = x - y || (isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : 0);
      return (next === "ascending" ? order : -order) || a.first - b.first;
    };
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
      body.append(...rows.sort(compare));
    }
  }));
}
