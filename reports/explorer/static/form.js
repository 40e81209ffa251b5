// The controls of a job, made from the descriptions that the server sends. State: field → text, of what differs from the beginning.

import { element, $ } from "./dom.js";

export class Form {
  /** changed: called when a value has changed. */
  constructor(root, changed) {
    this.root = root;
    this.changed = changed;
    this.controls = new Map();
  }

  build(sections) {
    this.root.replaceChildren(...sections.map(section => {
      const rows = section.controls.map(control => this.row(control));
      return section.folded
        ? element("details", {}, element("summary", {}, section.title), ...rows)
        : element("fieldset", {}, element("legend", {}, section.title), ...rows);
    }));
  }

  row(control) {
    const id = `field-${control.field}`;
    const input = control.kind === "select"
      ? element("select", { id }, ...control.choices.map(choice => element("option", { value: choice }, choice || "default")))
      : element("input", { id, type: control.kind === "number" ? "number" : "text", spellcheck: false, min: "0",
                           placeholder: control.derived ?? "" });
    input.value = control.value;
    input.addEventListener("change", () => this.changed());
    const slider = control.doubling ? this.slider(control, input) : null;
    const row = element("div", { className: "control", title: control.about ?? "" },
      element("label", { htmlFor: id }, ...control.label.split(/(?<=_)/).flatMap(part => [part, element("wbr")])),
      slider ? element("div", { className: "both" }, slider, input) : input);
    this.controls.set(control.field, { ...control, input, slider, row });
    return row;
  }

  /** A slider over powers of two beside a number. */
  slider(control, input) {
    const level = text => Math.round(Math.log2(Math.max(1, Number(text) || Number(control.derived) || 1)));
    const slider = element("input", { type: "range", min: 0, max: control.field === "plan.sequence" ? 20 : 14, step: 1,
                                      "aria-label": `${control.label}, powers of two` });
    slider.value = level(control.value);
    slider.addEventListener("input", () => { input.value = 2 ** Number(slider.value); this.changed(); });
    input.addEventListener("input", () => { slider.value = level(input.value); });
    input.levelled = () => { slider.value = level(input.value); };
    return slider;
  }

  /** What differs from the beginning, as [field, text]. */
  get changes() {
    const result = [];
    for (const [field, { input, value, row }] of this.controls) {
      const differs = input.value.trim() !== value && !(field === "tokens" && input.value.trim() === "1e12");
      row.classList.toggle("changed", differs);
      if (differs) result.push([field, input.value.trim()]);
    }
    return result;
  }

  /** Changes as `--set` reads them; an empty field is back at its default. */
  get texts() {
    const own = this.controls.get("tokens").input.value.trim();
    return this.changes.filter(([field]) => field !== "tokens").map(([field, text]) => `${field}=${text || "null"}`)
      .filter(text => text !== "price=null").concat(own ? [`tokens=${own}`] : []);
  }

  set(field, text) {
    const control = this.controls.get(field);
    if (!control) return false;
    if (control.kind === "select" && !control.choices.includes(text)) control.input.append(element("option", { value: text }, text));
    control.input.value = text;
    control.input.levelled?.();
    return true;
  }

  reset() {
    for (const [field, { value }] of this.controls) this.set(field, value);
  }

  /** Show what has the words in its name or description. */
  find(words) {
    const wanted = words.trim().toLowerCase();
    for (const { field, about, row } of this.controls.values()) {
      row.hidden = wanted !== "" && !`${field} ${about ?? ""}`.toLowerCase().includes(wanted);
      if (wanted && !row.hidden && row.parentElement.tagName === "DETAILS") row.parentElement.open = true;
    }
  }
}

/** Fields that differ, from and to the address of the page. */
export function fromAddress() {
  return [...new URLSearchParams(location.hash.slice(1))];
}

export function toAddress(changes) {
  const text = new URLSearchParams(changes).toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}

export const sections = () => $("#sections");
