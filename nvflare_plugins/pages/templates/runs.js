"use strict";
// Sorts the table by a column, and shows the chosen runs side by side. It reads and moves what is there, and writes no HTML.
const table = document.querySelector("#runs"), body = table.tBodies[0];
for (const head of table.tHead.rows[0].cells) {
  head.addEventListener("click", () => {
    const place = head.cellIndex, falls = head.ariaSort === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
    head.ariaSort = falls > 0 ? "ascending" : "descending";
    const key = row => row.cells[place].dataset.value ?? row.cells[place].textContent.trim();
    const order = (a, b) => a === "" ? 1 : b === "" ? -1 : falls * a.localeCompare(b, "en", { numeric: true });
    const numbers = (a, b) => a === "" ? 1 : b === "" ? -1 : falls * (a - b);
    const compare = [...body.rows].every(row => !isNaN(key(row))) ? numbers : order;
    body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
  });
}
const choose = () => {
  const chosen = new Set([...document.querySelectorAll("#runs input:checked")].map(one => one.value));
  for (const one of document.querySelectorAll("[data-run]")) one.style.display = chosen.has(one.dataset.run) ? "" : "none";
  for (const row of document.querySelectorAll("#compared tbody tr")) {
    const texts = [...row.cells].filter(cell => chosen.has(cell.dataset.run)).map(cell => cell.textContent.trim());
    row.style.display = texts.some(text => text) ? "" : "none";
    row.classList.toggle("differs", new Set(texts).size > 1);
  }
};
document.addEventListener("change", choose);
choose();
