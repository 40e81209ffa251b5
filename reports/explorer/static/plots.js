// Curves by uPlot: memory over time, linked with the timeline, and answers over values of a field.

import { seconds, significant } from "./dom.js";

/* global uPlot */

const colour = (plot, name) => getComputedStyle(plot.root).getPropertyValue(name).trim();

const axis = (label, values, size = 56) => ({ label, values, stroke: plot => colour(plot, "--dim"), grid: { stroke: plot => colour(plot, "--line"), width: 1 },
                                   ticks: { stroke: plot => colour(plot, "--line"), width: 1 }, size, labelSize: 20, font: "11px system-ui", labelFont: "12px system-ui" });

/** A stack of what a GPU holds by kind. hover: called with the moment under the pointer, or null. */
export class Memory {
  constructor(root, hover) {
    this.root = root;
    this.hover = hover;
    new ResizeObserver(() => this.plot?.setSize({ width: this.root.clientWidth, height: 210 })).observe(root);
  }

  /** left: pixels before the first moment: those of the names of the timeline's rows, so that moments stand above each other. */
  show(memory, step, window, left) {
    const total = new Float64Array(memory.times.length), stacked = [];
    for (const [, , sizes] of memory.kinds) {
      sizes.forEach((size, at) => { total[at] += size / 1e9; });
      stacked.push(Array.from(total));
    }
    const times = [...memory.times, step], data = [times, ...stacked.map(values => [...values, values.at(-1)])].map((values, at) => at ? values : times);
    const order = memory.kinds.map((_, at) => at).reverse();  // the highest sum is drawn first, the others over it
    this.plot?.destroy();
    this.root.replaceChildren();
    this.plot = new uPlot({
      width: this.root.clientWidth || 600, height: 210,
      scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: { range: (_, __, high) => [0, Math.max(high, 0.001) * 1.1] } },
      cursor: { drag: { x: false, y: false } },
      legend: { live: true },
      axes: [axis(null, (_, ticks) => ticks.map(seconds)), axis("GB", (_, ticks) => ticks.map(significant), left - 20)],
      padding: [8, 0, 0, 0],
      series: [{ label: "time", value: (_, value) => value === null || value === undefined ? "–" : seconds(value) },
        ...order.map(at => ({
          label: memory.kinds[at][0], stroke: memory.kinds[at][1], fill: memory.kinds[at][1], width: 0,
          points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }),
          value: (_, __, ___, place) => place === null || place === undefined ? "–"
            : `${significant((memory.kinds[at][2][Math.min(place, memory.kinds[at][2].length - 1)] ?? 0) / 1e9)} GB`,
        }))],
      hooks: { setCursor: [plot => this.hover(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)] },
    }, [data[0], ...order.map(at => data[at + 1])], this.root);
    this.look(window);
  }

  look([first, last]) {
    this.plot?.setScale("x", { min: first, max: last });
  }

  /** Show the moment that is under the pointer elsewhere. */
  mark(time) {
    if (!this.plot) return;
    this.plot.setCursor(time === null ? { left: -10, top: -10 } : { left: this.plot.valToPos(time, "x"), top: 20 }, false);
  }
}

/** Step time and throughput over the values of a field, in their order. */
export function curve(root, points, field) {
  root.replaceChildren();
  const places = points.map((_, at) => at), fitting = points.map(point => point.fits ? point.step : null);
  const others = points.map(point => point.step !== undefined && !point.fits ? point.step : null);
  const mark = (name, stroke) => ({ label: name, stroke, width: 2, spanGaps: true, points: { show: true, size: 8, fill: stroke },
                                    value: (_, value) => value === null || value === undefined ? "–" : seconds(value) });
  return new uPlot({
    width: root.clientWidth || 600, height: 260, scales: { x: { time: false, range: [-0.3, points.length - 0.7] }, y: { range: (_, __, high) => [0, high * 1.1] } },
    cursor: { drag: { x: false, y: false } },
    axes: [{ ...axis(field, (_, ticks) => ticks.map(tick => Number.isInteger(tick) ? points[tick]?.value ?? "" : "")), incrs: [1] },
           axis("step", (_, ticks) => ticks.map(seconds))],
    series: [{ label: field, value: (_, at) => points[at]?.value ?? "–" }, mark("step", "#0072B2"), { ...mark("step, out of memory", "#D55E00"), dash: [4, 4] }],
  }, [places, fitting, others], root);
}
