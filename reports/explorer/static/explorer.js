// The page: a job on the left, its answer on the right. All numbers come from the server of this machine.

import { $, element, gigabytes, shade, legend, percent, seconds, significant, table } from "./dom.js";
import { Form, fromAddress, sections, toAddress } from "./form.js";
import { curve, Memory } from "./plots.js";
import { Timeline } from "./timeline.js";

const CALM = 120;  // milliseconds without a change before the step over time is asked for: the next answer would wait for it
const QUIET = 300;  // milliseconds without a change before the interval is asked for, which takes longest
const main = $("main"), pinned = [];
let drawing = null, answer = null, asked = null, texts = [], lane = null, searching = null;

async function ask(name, body, signal) {
  const response = await fetch(`/api/${name}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
  const data = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(data.error ?? response.statusText);
  return data;
}

const form = new Form(sections(), () => later());
function later() {
  const now = form.texts;
  toAddress(form.changes);
  if (JSON.stringify(now) === JSON.stringify(texts)) return;
  texts = now;
  drawing?.abort();
  if (!asked) update();
}

/** Ask at once, and again for what changes meanwhile: the server works on one answer at a time. */
async function update() {
  main.classList.add("stale");
  let good;
  do {
    asked = texts;
    good = await ask("answer", { changes: asked }).then(data => { show(answer = data); return true; }).catch(error => failed(error.message));
  } while (asked !== texts);
  asked = null;
  if (!good) return;
  failed("");
  main.classList.remove("stale");
  draw(answer.hash).catch(error => { if (error.name !== "AbortError") failed(error.message); });
}

/** The step over time; the interval around it when nothing has changed for a while. */
async function draw(hash) {
  const { signal } = drawing = new AbortController();
  await new Promise(done => setTimeout(done, CALM));
  if (signal.aborted) return;
  const data = await ask("timeline", { changes: texts }, signal).catch(error => {
    if (error.name === "AbortError") throw error;
    $("#timeline .readout").textContent = error.message;
  });
  lane = null;
  if (data) { timeline.show(data); held(data); }
  main.dataset.ready = hash;
  await new Promise(done => setTimeout(done, QUIET));
  if (!signal.aborted) cards($("#cards"), (await ask("interval", { changes: texts }, signal)).cards);
}

function failed(message) {
  $("#error").textContent = message;
  $("#error").hidden = !message;
}

function show(data) {
  $("#verdict").textContent = data.verdict.replace(/(\d) (?=[kMGT%s])/g, "$1\u00a0");  // no number without its unit at the end of a line
  $("#verdict").className = data.fits ? "" : "bad";
  $("#short").textContent = `${seconds(data.step)}, ${data.fits ? "fits" : "out of memory"}`;
  document.title = `${seconds(data.step)} · shardyard explore`;
  cards($("#cards"), data.cards);
  stack($("#breakdown"), data.breakdown.map(({ name, seconds: time, colour }) => [name, time, colour, `${seconds(time)} (${percent(time / data.step)})`]));
  memory(data);
  $("#volume").replaceChildren(data.volume.length ? table(["sent by a rank along", "bytes", "in parameters"], data.volume) : "nothing is sent");
  $("#load").replaceChildren(data.links.length ? table(["hottest links", "of capacity"], data.links) : "");
  $("#notes .notes").replaceChildren(...data.notes.map(note => element("li", {}, note)));
  $("#provenance").textContent = `${data.profile} · hash ${data.hash}`;
  $("[data-take=yaml]").disabled = !data.take.yaml;
  $("#take pre").textContent = data.take.command;
  for (const [field, control] of form.controls) {
    const value = data.resolved[field.replace("plan.", "")];
    if (field.startsWith("plan.") && control.kind !== "select" && value !== undefined && value !== null) control.input.placeholder = value;
  }
  compare();
}

const ROW = 7;  // cards beside each other at most

/** "16.4 s (14.8 s–18.1 s)", "61.8 of 84.9 GB", "$1 M at $3/h": the number, and what is said about it. */
function parts(value) {
  const [, number, unit] = value.match(/^(\S+) of \S+ (\S+)$/) ?? [];
  if (unit) return [`${number} ${unit}`, value.slice(number.length + 1)];
  const [, first, inside, behind] = value.match(/^(.*?)(?: \((.*)\)| (at .*))?$/);
  return [first, inside ?? behind];
}

/** Numbers and what they are, in rows that are filled. */
function cards(root, entries) {
  root.style.setProperty("--row", Math.ceil(entries.length / Math.ceil(entries.length / ROW)));
  root.replaceChildren(...entries.map(([label, value, about]) => {
    const [number, more] = parts(value);
    return element("div", { className: "card", title: about }, element("span", {}, label), element("b", {}, number),
      more ? element("span", {}, more) : null);
  }));
}

function stack(section, entries) {
  const whole = entries.reduce((sum, [, value]) => sum + value, 0);
  const bar = $(".stack", section);
  bar.replaceChildren(...entries.map(([name, value, colour, text]) =>
    element("div", { title: `${name}: ${text}`, style: { width: `${100 * value / whole}%`, background: shade(colour) } })));
  bar.setAttribute("aria-label", entries.map(([name, , , text]) => `${name} ${text}`).join(", "));
  legend($(".legend", section), entries.map(([name, , colour, text]) => [name, colour, text]));
}

function memory(data) {
  const most = Math.max(data.capacity, ...data.memory.map(stage => stage.peak)), width = size => `${100 * size / most}%`;
  $("#memory .bars").replaceChildren(...data.memory.flatMap(stage => [
    element("span", {}, `stage ${stage.stage}`),
    element("div", { className: "bar", role: "img", "aria-label": stage.kinds.map(([kind, size]) => `${kind} ${gigabytes(size)}`).join(", ") },
      ...stage.kinds.map(([kind, size, colour]) => element("div", { title: `${kind}: ${gigabytes(size)}`, style: { width: width(size), background: colour } })),
      element("div", { className: "limit", title: `capacity ${gigabytes(data.capacity)}`, style: { left: `calc(${width(data.capacity)} - 2px)` } })),
    element("span", {}, `${gigabytes(stage.peak)} of ${gigabytes(data.capacity)}`)]));
  const worst = data.memory.reduce((one, other) => other.peak > one.peak ? other : one);
  legend($("#memory .legend"), worst.kinds.filter(([, size]) => size > 0).map(([kind, size, colour]) => [kind, colour, gigabytes(size)]));
}

// -- the step over time, linked with memory over time

const plot = new Memory($("#timeline .plot"), time => timeline.mark(time));
const timeline = new Timeline($("#timeline"), {
  more: window => ask("timeline", { changes: texts, window, ...(lane === null ? {} : { lane }) }, drawing.signal)
    .then(data => timeline.show(data, true)).catch(() => {}),
  picked: chosen => {
    if (chosen === undefined) return;
    lane = chosen;
    ask("timeline", { changes: texts, lane }, drawing.signal).then(data => held(data)).catch(() => {});
  },
  moved: window => plot.look(window),
  at: time => plot.mark(time),
});

function held(data) {
  $("#timeline h3").textContent = `What a GPU of ${data.memory.name} holds; room for tensors: ${gigabytes(data.memory.room)}`;
  plot.show(data.memory, data.step, timeline.window, timeline.names);
}

// -- pinned answers beside this one

$("#pin").addEventListener("click", () => {
  if (!answer) return;
  const changes = form.changes;
  pinned.push({ name: changes.map(([field, text]) => `${field.replace("plan.", "")}=${text}`).join(" ") || "as it began", changes, answer });
  compare();
});

function compare() {
  const worst = data => Math.max(...data.memory.map(stage => stage.peak));
  const rows = [{ name: "this", answer }, ...pinned];
  const cell = (value, other, text, lower = true) => {
    const change = value / other - 1;
    return element("span", { className: Math.abs(change) < 1e-4 ? "" : (change < 0) === lower ? "better" : "worse" },
      Math.abs(change) < 1e-4 ? text : `${text} (${change > 0 ? "+" : "−"}${Math.abs(100 * change).toFixed(1)} %)`);
  };
  $("#pinned .wide").replaceChildren(pinned.length === 0 ? element("p", { className: "dim" }, "“pin this answer” keeps it here beside the next ones") :
    table(["", "step", `${answer.unit}/s`, "MFU", "peak memory", ""], rows.map(({ name, answer: data, changes }, at) => [
      name, cell(data.step, answer.step, seconds(data.step)), cell(data.tokens_per_second, answer.tokens_per_second, significant(data.tokens_per_second), false),
      percent(data.mfu), data.fits ? gigabytes(worst(data)) : `${gigabytes(worst(data))}, out of memory`,
      at ? element("span", {}, element("button", { type: "button", onclick: () => restore(changes) }, "go back"), " ",
        element("button", { type: "button", onclick: () => { pinned.splice(at - 1, 1); compare(); } }, "drop")) : ""])));
}

function restore(changes) {
  form.reset();
  for (const [field, text] of changes) form.set(field, text);
  later();
}

// -- search

$("#go").addEventListener("click", async () => {
  if (searching) { searching.abort(); return; }
  searching = new AbortController();
  $("#go").textContent = "stop";
  $("#search .wide").replaceChildren();
  try {
    const response = await fetch("/api/search", { method: "POST", headers: { "content-type": "application/json" }, signal: searching.signal,
      body: JSON.stringify({ changes: texts, every: $("#how").value === "every", seconds: Number($("#seconds").value) || 60 }) });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.filter(Boolean)) progress(JSON.parse(line));
    }
  } catch (error) {
    $("#progress").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    searching = null;
    $("#go").textContent = "search";
  }
});

function progress(state) {
  if (state.error) { $("#progress").textContent = state.error; return; }
  if (!state.done) {
    $("#progress").textContent = `${state.stage}: ${state.simulated} simulated, ${state.open} open${state.best ? `, best ${seconds(state.best)}` : ""}`;
    return;
  }
  $("#progress").textContent = `${state.of.toLocaleString("en")} plans: ${state.verdict}`;
  $("#search .wide").replaceChildren(state.plans.length ? table(["plan", "step", "against this", "MFU", "peak memory", ""], state.plans.map(plan => [
    element("span", { title: plan.changes.join(" ") }, plan.name || plan.changes.map(text => text.replace("plan.", "")).join(" ") || "this plan"), seconds(plan.step),
    `${plan.step < answer.step ? "" : "+"}${((plan.step / answer.step - 1) * 100).toFixed(1)} %`.replace("-", "−"), percent(plan.mfu),
    `${gigabytes(plan.memory)}${plan.fits ? "" : ", does not fit"}`,
    element("button", { type: "button", onclick: () => adopt(plan.changes) }, "take it")]), at => at === 0) : "");
}

function adopt(changes) {
  for (const text of changes) {
    const at = text.indexOf("="), field = text.slice(0, at), value = text.slice(at + 1);
    form.set(field, value === "null" ? "" : value);
  }
  later();
}

// -- values of a field, days, taking away

const STARTS = { "nodes": "1, 2, 4, 8, 16, 32", "plan.microbatch": "1, 2, 4, 8, 16", "plan.global_batch": "32, 64, 128, 256, 512" };

function fields() {
  $("#field").replaceChildren(...[...form.controls.values()].filter(({ field }) => !["model", "tokens", "price"].includes(field))
    .map(({ field }) => element("option", { value: field }, field)));
  const start = () => {
    const control = form.controls.get($("#field").value), amount = control.value.match(/^([\d.]+) (.+)$/);
    $("#values").value = control.choices ? control.choices.filter(Boolean).join(", ") : STARTS[control.field]
      ?? (amount ? [0.25, 0.5, 1, 2, 4].map(times => `${significant(times * Number(amount[1])).replace(",", "")} ${amount[2]}`).join(", ") : "1, 2, 4, 8");
  };
  $("#field").addEventListener("change", start);
  $("#field").value = "nodes";
  start();
}

$("#draw").addEventListener("click", async () => {
  const field = $("#field").value, values = $("#values").value.split(",").map(text => text.trim()).filter(Boolean).map(text => `${field}=${text}`);
  try {
    const points = (await ask("curve", { changes: texts, field, values })).map(point => ({ ...point, value: point.value.slice(field.length + 1) }));
    curve($("#curve .plot"), points, field);
    $("#curve .wide").replaceChildren(table([field, "step", `${answer?.unit ?? "tokens"}/s`, "MFU", "peak memory"], points.map(point => point.error
      ? [point.value, point.error]
      : [point.value, seconds(point.step), significant(point.tokens_per_second), percent(point.mfu), `${gigabytes(point.memory)}${point.fits ? "" : ", out of memory"}`])));
  } catch (error) {
    $("#curve .plot").replaceChildren(error.message);
  }
});

const CAUSES = ["#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#F0E442", "#999999", "#000000", "#7f3c8d", "#a5aa99"];
$("#run").addEventListener("click", async () => {
  $("#run").disabled = true;
  try {
    const data = await ask("days", { changes: texts });
    cards($("#days .cards"), data.cards);
    stack($("#days"), data.shares.map(([cause, part], at) => [cause, part, CAUSES[at % CAUSES.length], percent(part)]));
    $("#days .notes").replaceChildren(...data.notes.map(note => element("li", {}, note)));
  } catch (error) {
    $("#days .cards").replaceChildren(error.message);
  } finally {
    $("#run").disabled = false;
  }
});

for (const button of document.querySelectorAll("[data-take]")) {
  button.addEventListener("click", async () => {
    const text = answer?.take[button.dataset.take] ?? "";
    $("#take pre").textContent = text;
    await navigator.clipboard?.writeText(text).then(() => { $("#take [role=status]").textContent = "copied"; }, () => {});
  });
}

$("#reset").addEventListener("click", () => { form.reset(); later(); });
$("#filter").addEventListener("input", event => form.find(event.target.value));
addEventListener("hashchange", () => restore(fromAddress()));

ask("form", {}).then(data => {
  $("#name").textContent = data.name;
  form.build(data.sections);
  fields();
  for (const [field, text] of fromAddress()) form.set(field, text);
  texts = form.texts;
  update();
}).catch(error => failed(error.message));
