
"use strict";
// A run over its days: the strip above shows all of it, the bar below the part that is looked at. Training has its saves and
// evaluations worked out from the steps between them, as soon as they are far enough apart to be seen.
const SHORTEST = 5, APART = 12, HAIR = 1.5; // seconds of a view; pixels between pauses that are drawn; of all but training at least

function* pauses([origin, first, step, every], from, to) {
  // [start, end, cause] of what stops training between two times, after every so many steps
  const before = number => every.reduce((sum, [steps, seconds]) =>
    sum + seconds * (Math.floor((number - 1) / steps) - Math.floor(first / steps)), 0);
  const ended = number => origin + (number - first) * step + (number > first ? before(number) : 0);
  if (!every.length) return;
  const all = every.reduce((sum, [steps, seconds]) => sum + seconds / steps, step);
  const margin = every.reduce((sum, [, seconds]) => sum + seconds, 0);
  let number = Math.max(first, first + Math.floor((from - origin - 2 * margin) / all) - 1);
  for (;;) {
    number = Math.min(...every.map(([steps]) => (Math.floor(number / steps) + 1) * steps));
    let left = ended(number);
    if (left >= to) return;
    for (const [steps, seconds, cause] of every) {
      if (number % steps) continue;
      if (left + seconds > from && left < to) yield [left, left + seconds, cause];
      left += seconds;
    }
  }
}

function pieces(data, from, to, width) {
  // What a bar of `width` pixels shows between two times, training first so that the rest lies over it
  const pixel = (to - from) / width, below = [], above = [];
  let low = 0, high = data.spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.spans[middle][1] <= from) low = middle + 1; else high = middle;
  }
  for (let at = low; at < data.spans.length && data.spans[at][0] < to; at++) {
    const [start, end, cause, training] = data.spans[at];
    (cause === data.training ? below : above).push([start, end, cause, at]);
    if (!training || !training[3].length) continue;
    if (Math.min(...training[3].map(([steps]) => steps)) * training[2] < APART * pixel) continue;
    for (const [left, right, kind] of pauses(training, Math.max(from, start), Math.min(to, end)))
      above.push([Math.max(left, start), Math.min(right, end), kind, at]);
  }
  return [...below, ...above];
}

function length(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [0.001, "ms"]];
  const [size, unit] = units.find(([each]) => seconds >= 2 * each) ?? units[4];
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

function moment(seconds) {
  const day = Math.floor(seconds / 86400), rest = seconds - day * 86400, two = value => String(Math.floor(value)).padStart(2, "0");
  return `day ${day} ${two(rest / 3600)}:${two(rest % 3600 / 60)}:${two(rest % 60)}`;
}

function interruptions(data) {
  // [start, end] between two stretches of training
  const result = [];
  let start = null;
  for (const [begin, end, cause] of data.spans) {
    if (cause !== data.training) { start ??= begin; continue; }
    if (start !== null && start > 0) result.push([start, begin]);
    start = null;
  }
  return result;
}

function ticks(from, to) {
  // Times that are round, at most eight, and how each is written
  const sizes = [86400, 3600, 60, 1].flatMap(unit => [30, 20, 15, 10, 6, 5, 3, 2, 1].map(times => times * unit)).sort((a, b) => a - b);
  const years = [50, 100, 200, 500, 1000].map(days => days * 86400);
  const every = [...sizes, ...years].find(size => (to - from) / size <= 8) ?? years[4];
  const result = [];
  for (let time = Math.ceil(from / every) * every; time <= to; time += every)
    result.push([time, every >= 86400 ? `day ${Math.round(time / 86400)}` : moment(time).replace(/:00$/, "")]);
  return result;
}

function show(box, data) {
  const part = name => box.querySelector(`[data-is=${name}]`);
  const [strip, detail, under, view] = ["strip", "detail", "under", "view"].map(part);
  const stops = interruptions(data), whole = data.seconds;
  let from = 0, to = whole, drag = null;

  function bar(canvas, begin, end, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, pen = canvas.getContext("2d");
    canvas.width = width * ratio;
    canvas.height = canvas.clientHeight * ratio;
    pen.scale(ratio, ratio);
    for (const [left, right, cause] of pieces(data, begin, end, width)) {
      const x = (left - begin) / (end - begin) * width, wide = (right - left) / (end - begin) * width;
      pen.fillStyle = data.colours[cause];
      pen.fillRect(x, 0, Math.max(wide, cause === data.training ? 0 : HAIR), height);
    }
    return [pen, width];
  }

  function draw() {
    const ink = getComputedStyle(box).color;
    const [above, wide] = bar(strip, 0, whole, strip.clientHeight);
    above.strokeStyle = ink;
    above.lineWidth = 2;
    above.strokeRect(from / whole * wide, 1, Math.max(3, (to - from) / whole * wide), strip.clientHeight - 2);
    const tall = detail.clientHeight - 22, [pen, width] = bar(detail, from, to, tall);
    Object.assign(pen, {fillStyle: ink, font: "12px system-ui, sans-serif", textAlign: "center", textBaseline: "top"});
    for (const [time, name] of ticks(from, to)) {
      const x = (time - from) / (to - from) * width, half = pen.measureText(name).width / 2;
      pen.fillRect(x, tall, 1, 4);
      if (x >= half && x <= width - half) pen.fillText(name, x, tall + 6);
    }
    view.textContent = to - from < whole ? `${length(to - from)} from ${moment(from)}` : `all ${length(whole)}`;
  }

  function look(begin, end) {
    const long = Math.min(whole, Math.max(SHORTEST, end - begin));
    from = Math.min(Math.max(0, (begin + end - long) / 2), whole - long);
    to = from + long;
    draw();
  }
  const zoom = (factor, at = (from + to) / 2) => look(at - (at - from) * factor, at + (to - at) * factor);
  const move = part => look(from + part * (to - from), to + part * (to - from));
  function stop(way) {
    const middle = (from + to) / 2, slack = (to - from) / 100;
    const found = way > 0 ? stops.find(([left, right]) => (left + right) / 2 > middle + slack)
                          : stops.findLast(([left, right]) => (left + right) / 2 < middle - slack);
    if (found) look(found[0] - (found[1] - found[0]), found[1] + (found[1] - found[0]));
  }
  const actions = {all: () => look(0, whole), in: () => zoom(0.5), out: () => zoom(2), next: () => stop(1), previous: () => stop(-1)};
  const keys = {"+": actions.in, "-": actions.out, Home: actions.all, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
                PageUp: actions.previous, PageDown: actions.next};
  const time = (canvas, event, begin, end) => begin + (end - begin) * (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth;

  box.querySelectorAll("button").forEach(button => button.addEventListener("click", () => actions[button.dataset.do]()));
  box.addEventListener("keydown", event => {
    if (!(event.key in keys) || event.target.tagName === "BUTTON" && event.key.length > 1) return;
    event.preventDefault();
    keys[event.key]();
  });
  detail.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(Math.exp(event.deltaY / 400), time(detail, event, from, to));
  }, {passive: false});
  detail.addEventListener("pointerdown", event => {
    detail.setPointerCapture(event.pointerId);
    drag = [event.clientX, from, to];
  });
  detail.addEventListener("pointerup", () => { drag = null; });
  detail.addEventListener("dblclick", event => zoom(0.2, time(detail, event, from, to)));
  detail.addEventListener("pointermove", event => {
    if (drag) {
      const shift = (drag[0] - event.clientX) / detail.clientWidth * (drag[2] - drag[1]);
      return look(drag[1] + shift, drag[2] + shift);
    }
    const at = time(detail, event, from, to), near = 2 * (to - from) / detail.clientWidth;
    const here = pieces(data, from, to, detail.clientWidth).findLast(([left, right, cause]) =>
      cause === data.training ? left <= at && at <= right : left - near <= at && at <= right + near);
    under.textContent = here ? `${data.causes[here[2]]}: ${length(here[1] - here[0])}, from ${moment(here[0])}` : "\u00a0";
  });
  strip.addEventListener("pointerdown", event => {
    const at = time(strip, event, 0, whole), half = Math.min((to - from) / 2, whole / 20);
    look(at - half, at + half);
  });

  const used = new Set(data.spans.flatMap(([, , cause, training]) => [cause, ...(training?.[3] ?? []).map(pause => pause[2])]));
  part("legend").append(...data.causes.map((name, at) => [name, at]).filter(([, at]) => used.has(at)).map(([name, at]) => {
    const entry = document.createElement("span"), patch = document.createElement("i");
    patch.style.background = data.colours[at];
    entry.append(patch, name);
    return entry;
  }));
  box.hidden = false;
  window.addEventListener("resize", draw);
  draw();
}

if (typeof document !== "undefined")
  show(document.getElementById("run"), JSON.parse(document.getElementById("timeline").textContent));
