// Elements and numbers.

export const $ = (selector, inside = document) => inside.querySelector(selector);

/** An element with properties and children; texts are never read as HTML. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "style") Object.assign(made.style, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

/** 1.23 s, 45.6 ms. */
export function seconds(value) {
  if (!value) return "0 s";
  const [unit, name] = UNITS.find(([size]) => Math.abs(value) >= size * 0.9995) ?? UNITS.at(-1);
  return `${significant(value / unit)} ${name}`;
}

/** Three significant digits, no exponent. */
export function significant(value) {
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
}

export const gigabytes = value => `${significant(value / 1e9)} GB`;
export const percent = value => `${(100 * value).toFixed(1)} %`;

/** White or black, whichever is read more easily on a colour "#rrggbb". */
export function ink(colour) {
  const [red, green, blue] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16) / 255);
  return 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 ? "#000000" : "#ffffff";
}

/** What stands for nothing, or waiting, goes with the page: white and light grey would be the brightest of a dark one. */
export const shade = colour => ({ "#ffffff": "var(--paper)", "#e8e8e8": "var(--line)" })[colour.toLowerCase()] ?? colour;

export function legend(list, entries) {
  list.replaceChildren(...entries.map(([name, colour, text]) =>
    element("li", {}, element("i", { style: { background: shade(colour) } }), text ? `${name} ${text}` : name)));
}

/** A table; the last cell of a row that is shorter than the head goes to its end. */
export function table(head, rows, best = () => false) {
  return element("table", {},
    element("thead", {}, element("tr", {}, ...head.map(name => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((row, at) =>
      element("tr", { className: best(at) ? "best" : "" }, ...row.map((cell, place) => element("td", { colSpan: place + 1 === row.length ? head.length - place : 1 }, cell))))));
}
