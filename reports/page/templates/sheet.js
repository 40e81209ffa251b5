
"use strict";
// Tables that sort by a click on a column's name and filter by what is typed. The state is in the page's address
// (#sort=step&order=descending&filter=tp=8), so a view can be sent to someone.
const text = value => value === null ? "" :
  typeof value === "number" ? (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)))) : String(value);
const display = value => typeof value === "number" && Math.abs(value) >= 10000 ? Math.round(value).toLocaleString("en") : text(value);
const compare = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 :
  typeof a === "number" && typeof b === "number" ? a - b : text(a).localeCompare(text(b), "en", {numeric: true});

function matcher(words, columns) {
  const tests = words.trim().toLowerCase().split(/\s+/).filter(Boolean).map(word => {
    const parts = /^(.+?)(<=|>=|=|<|>)(.+)$/.exec(word);
    const column = parts ? columns.findIndex(name => name.toLowerCase() === parts[1]) : -1;
    if (column < 0) return row => row.some(cell => text(cell).toLowerCase().includes(word));
    const number = Number(parts[3]);
    if (parts[2] === "=") return row => text(row[column]).toLowerCase() === parts[3];
    return row => row[column] !== null && {"<": row[column] < number, ">": row[column] > number,
                   "<=": row[column] <= number, ">=": row[column] >= number}[parts[2]];
  });
  return row => tests.every(test => test(row));
}

function sheet(box, {columns, rows, texts}) {
  const [input, total, body] = ["input", ".count", "tbody"].map(name => box.querySelector(name));
  const heads = [...box.querySelectorAll("th")];
  const state = {sort: -1, order: 1};
  function draw() {
    let shown = rows.filter(matcher(input.value, columns));
    if (state.sort >= 0) shown = shown.toSorted((a, b) =>
      a[state.sort] === null || b[state.sort] === null ? compare(a[state.sort], b[state.sort])
                                                       : state.order * compare(a[state.sort], b[state.sort]));
    body.replaceChildren(...shown.map(row => {
      const line = document.createElement("tr");
      line.append(...row.map((value, number) => {
        const cell = Object.assign(document.createElement("td"), {textContent: display(value)});
        if (texts.includes(number)) cell.className = "text";
        return cell;
      }));
      return line;
    }));
    total.textContent = ` ${shown.length} of ${rows.length}`;
    heads.forEach((head, number) =>
      head.setAttribute("aria-sort", number !== state.sort ? "none" : state.order > 0 ? "ascending" : "descending"));
  }
  function by(number) {
    state.order = state.sort === number ? -state.order : 1;
    state.sort = number;
    draw();
  }
  heads.forEach((head, number) => {
    head.addEventListener("click", () => by(number));
    head.addEventListener("keydown", event => { 
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      by(number);
    });
  });
  input.addEventListener("input", draw);
  const asked = new URLSearchParams(location.hash.slice(1));
  input.value = asked.get("filter") ?? "";
  state.sort = columns.indexOf(asked.get("sort"));
  state.order = asked.get("order") === "descending" ? -1 : 1;
  draw();
}

const sheets = JSON.parse(document.getElementById("sheets").textContent);
document.querySelectorAll(".sheet").forEach((box, number) => sheet(box, sheets[number]));
