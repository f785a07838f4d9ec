// Step time as a line, with marks where the allocation changed and where incidents opened.
// Pointer and arrow keys move a cursor; its values stand beside the title.

import { byId, setEmpty, setText, svg } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 208;
const PAD = { left: 56, right: 12, top: 24, bottom: 24 };
const MARK_WIDTH = 12; // pixels; nearer marks are shown as one
const CLIP_FROM = 4; // a step this many times the 95th percentile leaves the scale

const host = byId("chart");
const root = svg("svg", {
  class: "chart-svg", tabindex: "0", role: "slider", "aria-label": "Step time by step",
});
host.append(root);

let data = null;
let scale = null;
let cursor = null; // step under the cursor, or null to follow the newest

export function renderChart({ job, changes, incidents }) {
  const isEmpty = job.steps.length === 0;
  setEmpty(byId("chart-empty"), isEmpty ? "No step committed yet. The first one may compile for minutes." : null);
  host.hidden = byId("chart-legend").hidden = isEmpty;
  data = isEmpty ? null : {
    steps: job.steps,
    times: job.step_times_s,
    changes: changes.map((c) => ({ step: c.step, text: `epoch ${c.epoch}, ${words(c.reason)}` })),
    incidents: incidents.map((i) => ({ step: i.opened_step, text: i.summary })),
  };
  draw();
}

const words = (name) => name.replaceAll("_", " ");

function draw() {
  const width = host.clientWidth;
  if (data === null || width === 0) {
    setText(byId("chart-readout"), "");
    return;
  }
  scale = scaleFor(width);
  root.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  root.setAttribute("width", width);
  root.setAttribute("height", HEIGHT);
  root.replaceChildren(...grid(), ...marks(), ...line(), ...cursorMarks());
  readout();
}

function scaleFor(width) {
  const { steps, times } = data;
  const sorted = [...times].sort((a, b) => a - b);
  const high = sorted[Math.floor(0.95 * (sorted.length - 1))];
  const isClipped = sorted.at(-1) > CLIP_FROM * high;
  const tick = niceTick((isClipped ? 1.5 * high : sorted.at(-1)) || 1);
  const top = tick * Math.ceil(((isClipped ? 1.5 * high : sorted.at(-1)) || 1) / tick);
  const first = steps[0];
  const span = Math.max(1, steps.at(-1) - first);
  const inner = width - PAD.left - PAD.right;
  const innerHeight = HEIGHT - PAD.top - PAD.bottom;
  const over = times.filter((t) => t > top).length;
  const note = byId("chart-clipped");
  note.hidden = over === 0;
  setText(note, `${format.count(over, "step")} above the scale, longest ${format.duration(sorted.at(-1))}`);
  return {
    width, tick, top, first, last: first + span,
    x: (step) => PAD.left + (inner * (step - first)) / span,
    y: (s) => PAD.top + innerHeight * (1 - Math.min(s, top) / top),
    stepAt: (x) => first + (span * (x - PAD.left)) / inner,
  };
}

/** Three to five ticks of 1, 2 or 5 times a power of ten. */
function niceTick(most) {
  const raw = most / 5;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((n) => n * power >= raw);
}

function grid() {
  const nodes = [];
  for (let i = 0; i * scale.tick <= scale.top * 1.001; i += 1) {
    const y = scale.y(i * scale.tick);
    nodes.push(svg("line", { class: "grid", x1: PAD.left, x2: scale.width - PAD.right, y1: y, y2: y }));
    nodes.push(label(i ? format.duration(i * scale.tick) : "0", PAD.left - 8, y + 4, "end"));
  }
  const base = HEIGHT - 6;
  nodes.push(label(`step ${format.integer(data.steps[0])}`, PAD.left, base, "start"));
  if (data.steps.length > 1) {
    nodes.push(label(format.integer(data.steps.at(-1)), scale.width - PAD.right, base, "end"));
  }
  return nodes;
}

function label(text, x, y, anchor, className = "axis") {
  const node = svg("text", { class: className, x, y, "text-anchor": anchor });
  node.textContent = text;
  return node;
}

function line() {
  const points = data.steps.map((step, i) => `${scale.x(step).toFixed(1)},${scale.y(data.times[i]).toFixed(1)}`);
  const floor = scale.y(0);
  const area = `${scale.x(data.steps[0])},${floor} ${points.join(" ")} ${scale.x(data.steps.at(-1))},${floor}`;
  return [svg("polygon", { class: "area", points: area }), svg("polyline", { class: "line", points: points.join(" ") })];
}

const isShown = (mark) => mark.step >= scale.first && mark.step <= scale.last;

function marks() {
  const nodes = [];
  for (const { x, text, number } of groups(data.changes)) {
    nodes.push(svg("line", { class: "mark-change", x1: x, x2: x, y1: PAD.top - 8, y2: scale.y(0) }));
    nodes.push(titled(svg("path", { class: "mark-change-head", d: `M${x} ${PAD.top - 16}l5 5-5 5-5-5z` }), text));
    if (number > 1) nodes.push(label(number, x + 8, PAD.top - 7, "start", "mark-count"));
  }
  for (const { x, text, number } of groups(data.incidents)) {
    const y = scale.y(0);
    nodes.push(titled(svg("path", { class: "mark-incident", d: `M${x} ${y - 11}l6 11h-12z` }), text));
    if (number > 1) nodes.push(label(number, x, y - 14, "middle", "mark-count"));
  }
  return nodes;
}

/** Marks that would lie on each other become one, with all their texts and their number. */
function groups(marks) {
  const merged = [];
  for (const mark of marks.filter(isShown).sort((a, b) => a.step - b.step)) {
    const x = scale.x(mark.step);
    const last = merged.at(-1);
    if (last !== undefined && x - last.x < MARK_WIDTH) last.marks.push(mark);
    else merged.push({ x, marks: [mark] });
  }
  return merged.map(({ x, marks: own }) => ({
    x, number: own.length,
    text: own.map((m) => (own.length > 1 ? `step ${format.integer(m.step)}: ${m.text}` : m.text)).join("\n"),
  }));
}

function titled(node, text) {
  const title = svg("title");
  title.textContent = text;
  node.append(title);
  return node;
}

// The cursor

function nearest(step) {
  let best = 0;
  data.steps.forEach((s, i) => {
    if (Math.abs(s - step) < Math.abs(data.steps[best] - step)) best = i;
  });
  return best;
}

function cursorMarks() {
  if (cursor === null) return [];
  const i = nearest(cursor);
  const x = scale.x(data.steps[i]);
  return [
    svg("line", { class: "cursor", x1: x, x2: x, y1: PAD.top, y2: scale.y(0) }),
    svg("circle", { class: "cursor-dot", cx: x, cy: scale.y(data.times[i]), r: 4 }),
  ];
}

function readout() {
  const i = cursor === null ? data.steps.length - 1 : nearest(cursor);
  const step = data.steps[i];
  const events = [...data.changes, ...data.incidents].filter((m) => m.step === step).map((m) => m.text.replace(/\.$/, ""));
  const head = `step ${format.integer(step)}: ${format.duration(data.times[i])}`;
  const text = events.length ? `${head}, ${events.join("; ")}` : head;
  setText(byId("chart-readout"), text);
  root.setAttribute("aria-valuemin", data.steps[0]);
  root.setAttribute("aria-valuemax", data.steps.at(-1));
  root.setAttribute("aria-valuenow", step);
  root.setAttribute("aria-valuetext", text);
}

function moveTo(index) {
  cursor = data.steps[Math.min(data.steps.length - 1, Math.max(0, index))];
  draw();
}

root.addEventListener("pointermove", (event) => {
  if (data === null) return;
  moveTo(nearest(scale.stepAt(event.clientX - root.getBoundingClientRect().left)));
});
root.addEventListener("pointerleave", () => { cursor = null; draw(); });
root.addEventListener("blur", () => { cursor = null; draw(); });
root.addEventListener("keydown", (event) => {
  if (data === null) return;
  const at = cursor === null ? data.steps.length - 1 : nearest(cursor);
  const to = {
    ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
    PageUp: at + 10, PageDown: at - 10, Home: 0, End: data.steps.length - 1,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  moveTo(to);
});
new ResizeObserver(draw).observe(host);
