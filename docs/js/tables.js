// A table that is wider than the page is shown row by row, every cell with the name of its column. css/site.css does that
// for tables with `data-rows`.
const tables = document.querySelectorAll(".md-typeset table:not([class])");

for (const table of tables) {
  const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, column) => (cell.dataset.column = names[column] ? `${names[column]}: ` : ""));
  }
  for (const end of table.querySelectorAll("td br")) { // a cell of several lines becomes one
    const comma = document.createElement("span");
    comma.className = "comma";
    comma.textContent = ", ";
    end.after(comma);
  }
}

function fit() {
  const room = document.querySelector(".md-content__inner").clientWidth;
  for (const table of tables) delete table.dataset.rows;
  const wide = [...tables].filter((table) => Math.max(table.offsetWidth, table.scrollWidth) > room);
  for (const table of wide) table.dataset.rows = "";
}

fit();
window.addEventListener("resize", fit);
