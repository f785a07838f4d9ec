// Replicas as cards: how each kind of unit is cut over the ranks, and a tile for every rank.

import { byId, el, keyed, setBadge, setText } from "./dom.js";
import * as format from "./format.js";

const LABEL_FROM = 0.06; // narrower segments have no room for their number
const DENSE_FROM = 17; // with so many ranks, healthy ones show only their name and slowness

const detailButton = byId("topology-detail");
detailButton.addEventListener("click", () => {
  const isPressed = detailButton.getAttribute("aria-pressed") !== "true";
  detailButton.setAttribute("aria-pressed", String(isPressed));
  setDensity(!isPressed);
});

function setDensity(isDense) {
  byId("replicas").dataset.density = isDense ? "dense" : "full";
}

export function renderTopology({ ranks, plan }) {
  byId("topology-none").hidden = ranks.length > 0;
  byId("topology-unplanned").hidden = ranks.length === 0 || plan.epoch !== null;
  setText(byId("topology-note"), plan.epoch === null ? "" : planNote(plan));
  detailButton.hidden = ranks.length < DENSE_FROM;
  setDensity(!detailButton.hidden && detailButton.getAttribute("aria-pressed") !== "true");
  keyed(byId("replicas"), groups(ranks, plan), (g) => g.key, createReplica, updateReplica);
}

/** "TP 3 + TP 2", "6 x TP 8 + TP 7". */
function planNote(plan) {
  const replicasOf = new Map();
  for (const { tp_degree: degree } of plan.replicas) {
    replicasOf.set(degree, (replicasOf.get(degree) ?? 0) + 1);
  }
  const degrees = [...replicasOf].sort(([a], [b]) => b - a)
    .map(([degree, n]) => (n > 1 ? `${n} \u00d7 TP ${degree}` : `TP ${degree}`));
  return `${degrees.join(" + ")}, ${format.count(plan.global_batch, "sequence")} a step`;
}

/** Replicas of the plan, then ranks that have no place in it. */
function groups(ranks, plan) {
  const byRank = new Map(ranks.map((r) => [r.rank, r]));
  const placed = plan.replicas.map((replica) => ({
    key: `replica-${replica.id}`,
    title: `Replica ${replica.id}`,
    note: `TP ${replica.tp_degree}, batch ${replica.batch} of ${plan.global_batch}`,
    kinds: Object.entries(replica.shares).map(([kind, shares]) => ({
      kind, shares, ranks: replica.ranks.map((n) => byRank.get(n) ?? { rank: n, health: "unknown" }),
    })),
    ranks: replica.ranks.flatMap((n) => byRank.get(n) ?? []),
  }));
  const inPlan = new Set(plan.replicas.flatMap((r) => r.ranks));
  const others = ranks.filter((r) => !inPlan.has(r.rank));
  if (others.length === 0) return placed;
  const title = plan.epoch === null ? "All ranks" : "Outside the plan";
  const note = format.count(others.length, "rank");
  return [...placed, { key: "others", title, note, kinds: [], ranks: others }];
}

function createReplica() {
  return el("article", "replica",
    el("header", "replica-head", el("h3"), el("span", "note")),
    el("div", "cuts"),
    el("ul", "tiles"));
}

function updateReplica(node, group) {
  setText(node.querySelector("h3"), group.title);
  setText(node.querySelector(".replica-head .note"), group.note);
  keyed(node.querySelector(".cuts"), group.kinds, (k) => k.kind, createCut, updateCut);
  keyed(node.querySelector(".tiles"), group.ranks, (r) => r.rank, createTile, updateTile);
}

// One bar for each kind of unit, cut by rank.

function createCut({ kind }) {
  return el("div", "cut", el("span", "cut-name", kind), el("div", "cut-bar"));
}

function updateCut(node, { kind, shares, ranks }) {
  const total = shares.reduce((a, b) => a + b, 0) || 1;
  const words = ranks.map((r, i) => `rank ${r.rank}: ${shares[i]}`).join(", ");
  const bar = node.querySelector(".cut-bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${kind} units of ${total}: ${words}`);
  const parts = ranks.map((r, i) => ({ ...r, units: shares[i], part: shares[i] / total, kind }));
  keyed(bar, parts.filter((p) => p.units > 0), (p) => p.rank, () => el("span", "segment"), (part, p) => {
    part.style.flexGrow = p.units;
    part.dataset.tone = format.HEALTH[p.health][0];
    part.title = `rank ${p.rank}: ${p.units} of ${format.count(total, `${p.kind} unit`)}`;
    setText(part, p.part >= LABEL_FROM ? String(p.units) : "");
  });
}

// One tile for each rank.

function createTile(rank) {
  const lines = el("dl", "tile-lines");
  for (const name of ["Expected", "Busy", "Wait", "Units", "Heard"]) {
    lines.append(el("dt", "", name), el("dd"));
  }
  const share = el("span", "meter-fill");
  return el("li", "tile",
    el("div", "tile-head", el("h4", "", `Rank ${rank.rank}`), el("span", "badge")),
    el("p", "slowness", el("span", "slowness-value"), el("span", "note")),
    el("div", "meter", share),
    lines,
    el("p", "activity"));
}

function updateTile(node, rank) {
  const badge = format.HEALTH[rank.health];
  node.dataset.tone = badge[0];
  node.dataset.calm = String(["ok", "left", "standby", "exited", "unknown"].includes(rank.health));
  node.title = `rank ${rank.rank}, process ${rank.pid}, step ${rank.step}`;
  setBadge(node.querySelector(".badge"), badge);
  setText(node.querySelector(".slowness-value"), format.ratio(rank.slowness));
  setText(node.querySelector(".slowness .note"), rank.slowness === null ? "slowness unknown" : "slowness");
  node.querySelector(".meter-fill").style.width = `${100 * (rank.share ?? 0)}%`;
  const values = [
    format.percent(rank.share), format.duration(rank.busy_s), format.duration(rank.wait_s),
    unitsText(rank), heardText(rank),
  ];
  node.querySelectorAll("dd").forEach((dd, i) => setText(dd, values[i]));
  node.querySelectorAll("dd")[3].title = unitsTitle(rank);
  setText(node.querySelector(".activity"), activityText(rank));
}

/** Units in the order of the bars above: attention, mlp, vocab. */
function unitsText(rank) {
  return rank.units === null ? format.UNKNOWN : Object.values(rank.units).join(" / ");
}

function unitsTitle(rank) {
  return Object.entries(rank.units ?? {}).map(([kind, n]) => `${kind} ${n}`).join(", ");
}

function activityText(rank) {
  const c = rank.collective;
  if (rank.alive !== true) return "";
  if (c === null) return "in own work";
  return `in ${c.op} #${c.seq}${c.age_s < 1 ? "" : ` for ${format.age(c.age_s)}`}`;
}

function heardText(rank) {
  if (rank.health === "exited") return rank.exit_status < 0 ? "left, status unknown" : `exit ${rank.exit_status}`;
  if (rank.progress_age_s === null) return format.UNKNOWN;
  const lost = rank.events_lost ? `, ${format.integer(rank.events_lost)} lost` : "";
  return `${format.age(rank.progress_age_s)} ago${lost}`;
}
