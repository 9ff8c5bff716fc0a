"use strict";

function sortBy(heading) {
  const row = heading.parentNode, table = row.closest("table"), body = table.tBodies[0];
  const column = [...row.cells].indexOf(heading);
  const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const key = (line) => line.cells[column].dataset.value;
  const numeric = (text) => text !== "" && !Number.isNaN(Number(text));
  const compare = (a, b) => {
    const x = key(a), y = key(b);
    if (numeric(x) !== numeric(y)) return numeric(x) ? -1 : 1;
    return direction * (numeric(x) ? x - y : x.localeCompare(y));
  };
  for (const other of row.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  body.append(...[...body.rows].sort(compare));
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

for (const input of document.querySelectorAll(".slider input")) {
  const box = input.closest("figure"), places = JSON.parse(input.dataset.places);
  const cells = [...box.querySelectorAll("[data-texts]")];
  const texts = cells.map((cell) => JSON.parse(cell.dataset.texts));
  const whole = (text) => text.replaceAll(" %", "\u00a0%");
  const show = () => {
    box.querySelector("output").textContent = whole(places[input.value]);
    input.setAttribute("aria-valuetext", places[input.value]);
    cells.forEach((cell, i) => { cell.textContent = whole(texts[i][input.value]); });
  };
  input.addEventListener("input", show);
  show();
}

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const fold of opened) fold.open = true;
});
addEventListener("afterprint", () => {
  for (const fold of opened) fold.open = false;
});
