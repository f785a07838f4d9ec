// The live page: follows the event stream and hands each snapshot to the panels.
// It never shows old values as live: without news for STALE_AFTER_MS it says since when.

import { renderChanges } from "./changes.js";
import { renderChart } from "./chart.js";
import { renderChecks } from "./checks.js";
import { byId, el, keyed, setBadge, setText } from "./dom.js";
import * as format from "./format.js";
import { refreshAges, renderIncidents } from "./incidents.js";
import { tokenQuery } from "./token.js";
import { renderTopology } from "./topology.js";

const STALE_AFTER_MS = 5000;
const RETRY_MS = 3000;

let newest = null; // { snapshot, at } of the last event; `at` is the browser's clock
let isBroken = false; // the stream has an error and no snapshot came since

function connect() {
  const stream = new EventSource(`/api/v1/stream${tokenQuery}`);
  stream.addEventListener("snapshot", (event) => {
    newest = { snapshot: JSON.parse(event.data), at: Date.now() };
    isBroken = false;
    render(newest.snapshot);
    renderConnection();
  });
  stream.addEventListener("error", () => {
    isBroken = true;
    renderConnection();
    // The browser reconnects by itself unless it was refused.
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  });
}

function render(snapshot) {
  renderHeader(snapshot);
  renderIncidents(snapshot);
  renderTopology(snapshot);
  renderChart(snapshot);
  renderChanges(snapshot);
  renderChecks(snapshot);
}

function renderConnection() {
  const silentMs = newest === null ? 0 : Date.now() - newest.at;
  const isStale = newest !== null && (isBroken || silentMs > STALE_AFTER_MS);
  const state = isStale ? "stale" : newest !== null ? "live" : isBroken ? "down" : "connecting";
  document.body.dataset.connection = state;
  const words = { stale: "Stale", live: "Live", down: "No connection", connecting: "Connecting" };
  setText(byId("connection"), words[state]);
  renderStale(state, silentMs);
  renderTitle(state);
}

function renderStale(state, silentMs) {
  const bar = byId("stale");
  bar.hidden = state === "live" || state === "connecting";
  if (state === "down") {
    setText(bar, "The sidecar does not answer. Trying again every few seconds.");
  } else if (state === "stale") {
    const reason = isBroken ? "The connection to the sidecar broke" : "The sidecar sends nothing";
    const since = format.clock(newest.at / 1000);
    setText(bar, `Stale since ${since}. ${reason}; all values below are from then. Reconnecting.`);
    setText(byId("connection"), `Stale for ${format.age(silentMs / 1000)}`);
  }
}

function renderTitle(state) {
  if (newest === null) return;
  const { job, incidents } = newest.snapshot;
  const firing = incidents.filter((i) => i.state === "firing").length;
  const lead = state === "stale" ? "stale" : firing ? `${firing} firing` : format.statusWords(job);
  document.title = `${lead} \u00b7 ${job.job_id}`;
}

function renderHeader({ job }) {
  setText(byId("job-id"), job.job_id);
  const [tone, sign] = format.STATUS[job.status];
  setBadge(byId("status"), [tone, sign, format.statusWords(job)]);
  keyed(byId("figures"), figures(job), (f) => f.name, createFigure, updateFigure);
}

function figures(job) {
  const isBroken = job.loss_is_finite === false;
  const first = job.loss_first === null ? "" : `from ${format.decimal(job.loss_first)}`;
  const left = job.ranks_left ? `, ${job.ranks_left} left` : "";
  const dead = `${job.ranks_dead || "none"} dead${left}`;
  const size = job.world_size === null ? "" : ` of ${job.world_size}`;
  const different = job.replicas_checked_steps - job.replicas_identical_steps;
  return [
    { name: "Step", value: format.integer(job.step), note: startedNote(job) },
    { name: "Step time", value: format.duration(job.step_time_s), note: medianNote(job) },
    {
      name: "Loss", value: isBroken ? "not finite" : format.decimal(job.loss), note: first,
      tone: isBroken ? "critical" : "",
    },
    { name: "Gradient norm", value: format.decimal(job.gradient_norm), note: "before clipping" },
    {
      name: "Ranks alive", value: `${job.ranks_alive}${size}`, note: dead,
      tone: job.ranks_dead ? "critical" : "",
    },
    {
      name: "Plan epoch", value: format.integer(job.plan_epoch),
      note: job.plan_digest?.slice(0, 8) ?? "no plan seen", title: job.plan_digest ?? "",
    },
    {
      name: "Replicas identical",
      value: job.replicas_checked_steps ? format.integer(job.replicas_identical_steps) : format.UNKNOWN,
      note: job.replicas_checked_steps
        ? `of ${format.count(job.replicas_checked_steps, "compared step")}` : "not compared yet",
      tone: different > 0 ? "critical" : "",
    },
  ];
}

function startedNote(job) {
  return job.started_unix_s === null ? "" : `since ${format.clock(job.started_unix_s)}`;
}

function medianNote(job) {
  const recent = job.step_times_s.slice(-20).sort((a, b) => a - b);
  if (recent.length < 2) return "";
  return `median ${format.duration(recent[recent.length >> 1])}`;
}

function createFigure(figure) {
  return el("div", "figure", el("dt", "", figure.name), el("dd", "value"), el("dd", "note"));
}

function updateFigure(node, { value, note, tone, title }) {
  node.dataset.tone = tone ?? "";
  node.title = title ?? "";
  setText(node.querySelector(".value"), value);
  setText(node.querySelector(".note"), note);
}

function keepToken() {
  for (const link of document.querySelectorAll("[data-keep-token]")) link.search = tokenQuery;
}

keepToken();
connect();
setInterval(() => {
  renderConnection();
  if (document.body.dataset.connection === "live") refreshAges();
}, 1000);
