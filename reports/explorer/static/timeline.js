// One step as rows of bars on a canvas: zoom by wheel and keys, move by dragging, read by hovering.

import { element, ink, legend, seconds } from "./dom.js";

const LEAST = 62, MOST_NAMES = 118, ROW = 34, AXIS = 22, MOST = 620, STRENGTH = 0.55, FONT = "11px system-ui, sans-serif";

/** A colour with white, of every other chunk of a pipeline rank. */
const mixed = colour => "#" + [1, 3, 5].map(at => Math.round(STRENGTH * parseInt(colour.slice(at, at + 2), 16) + (1 - STRENGTH) * 255)
  .toString(16).padStart(2, "0")).join("");

export class Timeline {
  /** more: asks for bars of a window [first, last]; picked: a row was clicked; moved: the window has changed; at: the moment under
   *  the pointer, or null. */
  constructor(section, { more, picked, moved, at }) {
    Object.assign(this, { more, picked, moved, at });
    this.canvas = section.querySelector("canvas");
    this.readout = section.querySelector(".readout");
    this.legend = section.querySelector(".legend");
    this.pen = this.canvas.getContext("2d");
    this.data = null;
    this.marked = null;
    this.names = MOST_NAMES;  // pixels of the rows' names, left of the bars
    this.listen(section);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Show the whole step of new data, or finer bars of the window that is shown. */
  show(data, finer = false) {
    this.data = data;
    if (!finer) this.window = [0, data.step];
    this.pen.font = FONT;
    this.names = Math.min(MOST_NAMES, Math.max(LEAST, 10 + Math.ceil(Math.max(...data.rows.map(row => this.pen.measureText(row.name).width)))));
    if (this.legend) legend(this.legend, [...data.keys.map(([name, colour]) => [name, colour]),
      ...Object.entries(data.axes).filter(([axis]) => !data.keys.some(([key]) => key === axis))
        .map(([axis, colour]) => [`${axis} communication`, colour])]);
    this.draw();
  }

  get rowHeight() {
    return Math.max(9, Math.min(ROW, (MOST - AXIS) / this.data.rows.length));
  }

  x(time) {
    const [first, last] = this.window;
    return this.names + (time - first) / (last - first) * (this.width - this.names);
  }

  time(x) {
    const [first, last] = this.window;
    return first + (x - this.names) / (this.width - this.names) * (last - first);
  }

  draw() {
    if (!this.data || !this.canvas.clientWidth) return;
    const scale = devicePixelRatio || 1, pen = this.pen;
    this.width = this.canvas.clientWidth;
    const height = this.rowHeight * this.data.rows.length + AXIS;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = this.width * scale;
    this.canvas.height = height * scale;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(this.canvas);
    this.colours = { ink: style.getPropertyValue("--ink"), line: style.getPropertyValue("--line"), dim: style.getPropertyValue("--dim") };
    pen.clearRect(0, 0, this.width, height);
    pen.font = FONT;
    this.data.rows.forEach((row, at) => this.drawRow(row, at * this.rowHeight));
    this.drawAxis(height);
    if (this.marked !== null) {
      pen.fillStyle = this.colours.ink;
      pen.fillRect(this.x(this.marked), 0, 1, height - AXIS);
    }
  }

  drawRow(row, top) {
    const { pen, data } = this, height = this.rowHeight, axes = Object.keys(data.axes);
    const strips = axes.length ? height * 0.3 : 0, upper = height - strips - 2;
    pen.save();
    pen.beginPath();
    pen.rect(this.names, top, this.width - this.names, height);
    pen.clip();
    for (const [start, end, microbatch, whole, shares, pale] of row.passes) {
      const left = this.x(start), width = Math.max(0.6, this.x(end) - left);
      if (left > this.width || left + width < this.names) continue;
      const sum = whole || shares.reduce((total, [, value]) => total + value, 0) || 1;
      let bottom = top + 1 + upper, largest = null;
      for (const [key, value] of shares) {
        const part = upper * value / sum, colour = pale ? mixed(data.keys[key][1]) : data.keys[key][1];
        pen.fillStyle = colour;
        pen.fillRect(left, bottom - part, width, part);
        bottom -= part;
        if (!largest || value > largest[0]) largest = [value, colour];
      }
      if (width > 3) {
        pen.fillStyle = this.colours.line;
        pen.fillRect(left + width - 0.5, top + 1, 0.5, upper);
      }
      if (width > 8 + 6 * String(microbatch).length && microbatch >= 0 && upper > 10 && largest) {
        pen.fillStyle = ink(largest[1]);
        pen.textAlign = "center";
        pen.fillText(String(microbatch), left + width / 2, top + 1 + upper / 2 + 4);
      }
    }
    axes.forEach((axis, place) => {
      pen.fillStyle = data.axes[axis];
      for (const [start, end] of row.transfers[axis] ?? []) {
        const left = this.x(start);
        pen.fillRect(left, top + height - strips + place * strips / axes.length, Math.max(0.8, this.x(end) - left), strips / axes.length - 0.5);
      }
    });
    pen.restore();
    pen.fillStyle = this.colours.ink;
    pen.textAlign = "left";
    if (height > 10) pen.fillText(row.name, 4, top + height / 2 + 3, this.names - 8);
    pen.fillStyle = this.colours.line;
    pen.fillRect(0, top + height - 0.5, this.width, 0.5);
  }

  drawAxis(height) {
    const { pen } = this, [first, last] = this.window;
    const rough = (last - first) / Math.max(2, (this.width - this.names) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
    pen.fillStyle = this.colours.dim;
    pen.textAlign = "center";
    for (let time = Math.ceil(first / step) * step; time <= last; time += step) {
      const x = this.x(time);
      pen.fillRect(x, height - AXIS, 1, 4);
      pen.fillText(seconds(time), Math.min(this.width - 22, Math.max(this.names + 16, x)), height - 6);
    }
  }

  /** Zoom by a factor about a moment, move by a part of the window, or show all. */
  zoom(factor, about = (this.window[0] + this.window[1]) / 2) {
    const [first, last] = this.window;
    this.look(about - (about - first) * factor, about + (last - about) * factor);
  }

  move(part) {
    const [first, last] = this.window, way = part * (last - first);
    this.look(first + way, last + way);
  }

  look(first, last) {
    if (!this.data) return;
    const length = Math.min(this.data.step, Math.max(this.data.step * 1e-6, last - first));
    first = Math.max(0, Math.min(this.data.step - length, first));
    this.window = [first, first + length];
    this.draw();
    this.moved(this.window);
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.more(this.window), 120);
  }

  mark(time) {
    this.marked = time;
    requestAnimationFrame(() => this.draw());
  }

  listen(section) {
    const { canvas } = this;
    canvas.addEventListener("wheel", event => {
      if (!this.data) return;
      event.preventDefault();
      this.zoom(1.25 ** Math.sign(event.deltaY), this.time(event.offsetX));
    }, { passive: false });
    let from = null;
    canvas.addEventListener("pointerdown", event => { from = { x: event.offsetX, window: this.window, moved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", event => {
      if (!this.data) return;
      if (from && Math.abs(event.offsetX - from.x) > 3) {
        from.moved = true;
        const [first, last] = from.window, way = (event.offsetX - from.x) / (this.width - this.names) * (last - first);
        this.look(first - way, last - way);
      } else this.hover(event);
    });
    canvas.addEventListener("pointerup", event => {
      if (from && !from.moved && this.data) this.picked(this.data.rows[Math.floor(event.offsetY / this.rowHeight)]?.lane);
      from = null;
    });
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", () => this.data && this.look(0, this.data.step));
    canvas.addEventListener("keydown", event => {
      const act = { "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1.4), ArrowLeft: () => this.move(-0.2),
                    ArrowRight: () => this.move(0.2), Home: () => this.look(0, this.data.step), 0: () => this.look(0, this.data.step) }[event.key];
      if (act && this.data) { event.preventDefault(); act(); }
    });
    for (const button of section.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => this.data &&
        ({ in: () => this.zoom(0.5), out: () => this.zoom(2), all: () => this.look(0, this.data.step) })[button.dataset.do]());
    }
  }

  hover(event) {
    const row = this.data.rows[Math.floor(event.offsetY / this.rowHeight)], time = this.time(event.offsetX);
    if (!row || event.offsetX < this.names) { this.leave(); return; }
    const bar = row.passes.find(([start, end]) => start <= time && time <= end);
    const shares = bar ? bar[4].map(([key, value]) => `${this.data.keys[key][0]} ${seconds(value)}`).join(", ") : "idle";
    const moving = Object.entries(row.transfers).filter(([, spans]) => spans.some(([start, end]) => start <= time && time <= end)).map(([axis]) => axis);
    this.readout.textContent = `${row.name} at ${seconds(time)}: ` +
      (bar ? `${bar[2] >= 0 ? `microbatch ${bar[2]}, ` : ""}${seconds(bar[0])} to ${seconds(bar[1])}: ` : "") + shares +
      (moving.length ? ` · beside: ${moving.join(", ")} communication` : "");
    this.mark(time);
    this.at(time);
  }

  leave() {
    this.readout.textContent = "";
    this.mark(null);
    this.at(null);
  }
}
