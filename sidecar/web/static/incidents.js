// Incidents: what is wrong, which signals agree, since when, and what to do.

import { chooseEpoch } from "./changes.js";
import { byId, el, keyed, setBadge, setEmpty, setText } from "./dom.js";
import * as format from "./format.js";
import { tokenQuery } from "./token.js";

const ORDER = { critical: 0, warning: 1, info: 2 };

let shown = [];
let announced = null; // ids of firing incidents already told; null before the first snapshot

export function renderIncidents({ incidents, checks, ranks, job }) {
  shown = incidents;
  const open = incidents.filter((i) => i.state !== "resolved").sort(byUrgency);
  const past = incidents.filter((i) => i.state === "resolved");
  const firing = open.filter((i) => i.state === "firing");
  setText(byId("incidents-note"), firing.length ? `${firing.length} firing` : "");
  setEmpty(byId("incidents-empty"), open.length ? null : quietText(checks, ranks, job));
  keyed(byId("incidents-open"), open, (i) => i.id, createIncident, updateIncident);
  keyed(byId("incidents-resolved"), past, (i) => i.id, createIncident, updateIncident);
  byId("incidents-past").hidden = past.length === 0;
  setText(byId("incidents-past-title"), `Resolved (${past.length})`);
  announce(firing);
}

/** Firing before pending, then by severity; the server's order (newest first) breaks ties. */
function byUrgency(a, b) {
  const rank = (i) => (i.state === "firing" ? 0 : 10) + ORDER[i.severity];
  return rank(a) - rank(b);
}

/** Silence means health only where the checks can judge. */
function quietText(checks, ranks, job) {
  if (ranks.length === 0) return "Nothing to judge: no rank seen yet.";
  if (job.status === "ended") return "No open incident. The job has ended.";
  const silent = checks.filter((c) => !c.ready);
  const names = (list) => list.map((c) => c.name).join(", ");
  const waiting = names(silent.filter((c) => c.applies));
  const useless = names(silent.filter((c) => !c.applies));
  const parts = [`${checks.length - silent.length} of ${format.count(checks.length, "check")} can judge`];
  if (waiting) parts.push(`still waiting for data: ${waiting}`);
  if (useless) parts.push(`not applicable: ${useless}`);
  return `No open incident. ${parts.join("; ")}.`;
}

export function refreshAges() {
  const byKey = new Map(shown.map((i) => [i.id, i]));
  for (const node of document.querySelectorAll(".incident")) {
    const incident = byKey.get(node.dataset.key);
    if (incident) setText(node.querySelector(".incident-since"), sinceText(incident));
  }
}

function createIncident() {
  return el("li", "incident",
    el("div", "incident-head", el("span", "badge"), el("span", "incident-subject"), el("span", "incident-since")),
    el("p", "incident-summary"),
    el("ul", "signals"),
    el("div", "incident-foot"));
}

function updateIncident(node, incident) {
  const isResolved = incident.state === "resolved";
  const [tone, sign, word] = format.SEVERITY[incident.severity];
  node.dataset.tone = tone;
  node.dataset.state = incident.state;
  const pending = incident.state === "pending" ? ", pending" : "";
  setBadge(node.querySelector(".badge"), isResolved ? ["ok", "\u2713", `resolved ${word}`] : [tone, sign, word + pending]);
  setText(node.querySelector(".incident-subject"), incident.subject);
  setText(node.querySelector(".incident-since"), sinceText(incident));
  setText(node.querySelector(".incident-summary"), incident.summary);
  keyed(node.querySelector(".signals"), Object.entries(incident.signals), ([name]) => name, createSignal, (li, [, text]) => {
    setText(li.querySelector(".signal-value"), text);
  });
  keyed(node.querySelector(".incident-foot"), links(incident), (l) => l.key, (l) => l.create(), () => {});
}

function createSignal([name]) {
  return el("li", "signal", el("span", "signal-name", name), el("span", "signal-value"));
}

function sinceText(incident) {
  const { opened_unix_s: opened, resolved_unix_s: resolved } = incident;
  if (incident.state === "resolved") {
    return `${format.clock(opened)}, lasted ${format.age(resolved - opened)}`;
  }
  return `since ${format.clock(opened)}, ${format.age(format.since(opened))}, step ${incident.opened_step}`;
}

function links(incident) {
  const list = incident.changes.map((epoch) => ({
    key: `change-${epoch}`,
    create: () => {
      const button = el("button", "text-button", `Change to epoch ${epoch}`);
      button.type = "button";
      button.addEventListener("click", () => chooseEpoch(epoch));
      return button;
    },
  }));
  const place = [["tensor", incident.tensor], ["unit", incident.unit]]
    .filter(([, value]) => value !== null).map(([name, value]) => `${name} ${value}`).join(", ");
  if (place) list.push({ key: "place", create: () => el("span", "", place) });
  if (incident.runbook !== null) {
    list.push({ key: "runbook", create: () => runbookLink(incident.runbook) });
  }
  return list;
}

/** The sidecar serves the runbooks itself; the path is that in the repository. */
function runbookLink(path) {
  const name = path.split("/").at(-1);
  const link = el("a", "", `Runbook ${name.replace(".md", "")}`);
  link.href = `/runbooks/${encodeURIComponent(name)}${tokenQuery}`;
  link.title = path;
  return link;
}

/** Tell screen readers about incidents that began to fire since the page was opened. */
function announce(firing) {
  const isFirst = announced === null;
  const fresh = isFirst ? [] : firing.filter((i) => !announced.has(i.id));
  announced = new Set(firing.map((i) => i.id));
  if (fresh.length === 0) return;
  const isUrgent = fresh.some((i) => i.severity === "critical");
  const text = fresh.map((i) => `New ${i.severity} incident: ${i.summary}`).join(" ");
  setText(byId(isUrgent ? "announce-now" : "announce"), text);
}
