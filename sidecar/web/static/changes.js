// Allocation changes: a list to choose from, and the chosen one as a waterfall of its spans.

import { byId, el, keyed, setBadge, setEmpty, setText } from "./dom.js";
import * as format from "./format.js";

const NONE = "No allocation change yet. One is shown here when a rank dies, turns slow or comes back.";

let changes = [];
let chosen = null; // key of the chosen change; null follows the newest
let chosenSpan = null; // key of the span whose numbers are shown

const keyOf = (change) => `${change.epoch}-${change.started_unix_s}`;
const words = (name) => name.replaceAll("_", " ");

export function renderChanges(snapshot) {
  changes = snapshot.changes;
  setEmpty(byId("changes-empty"), changes.length ? null : NONE);
  setText(byId("changes-note"), changes.length ? `${format.count(changes.length, "change")}, newest first` : "");
  draw();
}

/** Show the change of an epoch, from elsewhere on the page. */
export function chooseEpoch(epoch) {
  const change = changes.find((c) => c.epoch === epoch);
  if (change === undefined) return;
  choose(keyOf(change));
  byId("changes").querySelector("[aria-pressed=true]")?.focus();
}

function choose(key) {
  chosen = key;
  chosenSpan = null;
  draw();
}

function draw() {
  const change = changes.find((c) => keyOf(c) === chosen) ?? changes[0];
  keyed(byId("changes"), changes, keyOf, createRow, (node, c) => updateRow(node, c, c === change));
  drawWaterfall(change);
}

// The list

function createRow(change) {
  const button = el("button", "change", el("span", "change-epoch"), el("span", "badge"),
    el("span", "change-text"), el("span", "change-time"));
  button.type = "button";
  button.addEventListener("click", () => choose(keyOf(change)));
  button.addEventListener("keydown", (event) => moveFocus(event, byId("changes"), "button"));
  return el("li", "", button);
}

function updateRow(node, change, isChosen) {
  const button = node.firstChild;
  button.setAttribute("aria-pressed", String(isChosen));
  setText(node.querySelector(".change-epoch"), `Epoch ${change.epoch}`);
  setBadge(node.querySelector(".badge"), format.CHANGE[change.status]);
  setText(node.querySelector(".change-text"), `${words(change.reason)}, after step ${change.step}`);
  setText(node.querySelector(".change-time"), `${format.duration(change.seconds)}`);
}

/** Arrow keys move between the rows of a list. */
function moveFocus(event, list, selector) {
  const offset = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (offset === undefined) return;
  event.preventDefault();
  const rows = [...list.querySelectorAll(selector)];
  rows[rows.indexOf(event.currentTarget) + offset]?.focus();
}

// The waterfall

function drawWaterfall(change) {
  const host = byId("waterfall");
  host.hidden = change === undefined;
  if (change === undefined) return;
  if (!host.firstChild) {
    host.append(el("dl", "facts"), el("div", "spans"), el("p", "span-detail"));
    host.querySelector(".spans").setAttribute("role", "listbox");
  }
  keyed(host.querySelector(".facts"), facts(change), (f) => f.name, createFact, updateFact);
  drawSpans(host, change);
}

function facts(change) {
  const list = [
    { name: "Started", value: format.clock(change.started_unix_s) },
    { name: "Moved", value: movedText(change) },
    { name: "Verified", value: verifiedText(change) },
    { name: "Plan", value: `${change.from.slice(0, 8)} \u2192 ${change.to.slice(0, 8)}` },
  ];
  if (change.step_time_before_s !== null || change.judged !== null) {
    list.push({ name: "Step time", value: judgedText(change) });
  }
  if (change.error !== null) list.push({ name: "Error", value: change.error });
  if (change.incident !== null) list.push({ name: "Incident", value: change.incident });
  if (change.trace_id !== null) list.push({ name: "Trace", value: change.trace_id });
  return list;
}

function movedText(change) {
  const over = change.bytes_moved - change.bytes_lower_bound;
  const bound = over > 0 ? `${format.bytes(over)} above the lower bound` : "the lower bound";
  return `${format.bytes(change.bytes_moved)}, ${bound}`;
}

function verifiedText(change) {
  if (change.verified === null) return "not yet";
  return change.verified ? `${format.count(change.units_verified, "unit")} equal before and after` : "no";
}

function judgedText(change) {
  const before = format.duration(change.step_time_before_s);
  const after = format.duration(change.step_time_after_s);
  const ideal = change.step_time_ideal_s === null ? "" : `, ideal ${format.duration(change.step_time_ideal_s)}`;
  return `${before} \u2192 ${after}${ideal} (${change.judged ?? "not judged yet"})`;
}

function createFact(fact) {
  return el("div", "fact", el("dt", "", fact.name), el("dd"));
}

function updateFact(node, fact) {
  setText(node.querySelector("dd"), fact.value);
}

function drawSpans(host, change) {
  const rows = flatten(change.spans);
  const end = Math.max(change.seconds ?? 0, ...rows.map((r) => r.span.start_s + r.span.seconds), 1e-9);
  const current = rows.find((r) => r.key === chosenSpan) ?? rows[0];
  const list = host.querySelector(".spans");
  list.setAttribute("aria-label", `Spans of the change to epoch ${change.epoch}`);
  keyed(list, rows, (r) => r.key, createSpan, (node, r) => updateSpan(node, r, end, r === current));
  setText(host.querySelector(".span-detail"), current ? detailText(current.span, end) : "No span recorded yet.");
}

/** Spans in depth-first order, with depth and a key. */
function flatten(spans, depth = 0, prefix = "") {
  return spans.flatMap((span, i) => {
    const key = `${prefix}${i}`;
    return [{ span, depth, key }, ...flatten(span.children, depth + 1, `${key}.`)];
  });
}

function createSpan(row) {
  const node = el("div", "span", el("span", "span-name"), el("span", "span-track", el("span", "span-bar")),
    el("span", "span-time"), el("span", "span-bytes"));
  node.setAttribute("role", "option");
  node.addEventListener("focus", () => { chosenSpan = row.key; draw(); });
  node.addEventListener("click", () => node.focus());
  node.addEventListener("keydown", (event) => moveFocus(event, node.parentNode, ".span"));
  return node;
}

function updateSpan(node, { span, depth }, end, isCurrent) {
  node.tabIndex = isCurrent ? 0 : -1; // one stop for Tab; arrows move inside
  node.setAttribute("aria-selected", String(isCurrent));
  node.dataset.depth = depth;
  const bar = node.querySelector(".span-bar");
  bar.style.left = `${(100 * span.start_s) / end}%`;
  bar.style.width = `${(100 * span.seconds) / end}%`;
  bar.dataset.phase = shortName(span).split(" ")[0];
  setText(node.querySelector(".span-name"), shortName(span));
  setText(node.querySelector(".span-time"), format.duration(span.seconds));
  setText(node.querySelector(".span-bytes"), span.bytes ? format.bytes(span.bytes) : "");
}

function shortName(span) {
  return span.rank === null ? span.name.replace("nutp.", "") : `rank ${span.rank}`;
}

function detailText(span, end) {
  const rank = span.rank === null ? "" : `, rank ${span.rank}`;
  const part = format.percent(span.seconds / end);
  const rate = span.bytes && span.seconds ? `, ${format.bytes(span.bytes)} at ${format.bytes(span.bytes / span.seconds)}/s` : "";
  return `${span.name}${rank}: from ${format.duration(span.start_s)} for ${format.duration(span.seconds)}, ${part} of the change${rate}`;
}
