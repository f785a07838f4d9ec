// What is watched, and whether each check has enough data to judge.

import { byId, el, keyed, setBadge, setEmpty, setText } from "./dom.js";
import * as format from "./format.js";

export function renderChecks({ checks, incidents }) {
  setEmpty(byId("checks-empty"), checks.length ? null : "No check is configured.");
  byId("checks-table").hidden = checks.length === 0;
  const ready = checks.filter((c) => c.ready).length;
  setText(byId("checks-note"), checks.length ? `${ready} of ${checks.length} can judge` : "");
  keyed(byId("checks"), checks, (c) => c.name, createCheck, (node, c) => {
    updateCheck(node, c, worstOf(c, incidents));
  });
}

function createCheck(check) {
  const name = el("th", "", el("span", "check-name", check.name), el("span", "note", check.help));
  name.scope = "row";
  return el("tr", "", name, el("td", "", el("span", "badge")), el("td", "number runs"), el("td", "number failures"));
}

/** The loudest severity that a check has firing. */
function worstOf(check, incidents) {
  const firing = incidents.filter((i) => i.check === check.name && i.state === "firing");
  return ["critical", "warning", "info"].find((s) => firing.some((i) => i.severity === s)) ?? "warning";
}

function updateCheck(node, check, severity) {
  setBadge(node.querySelector(".badge"), stateOf(check, severity));
  setText(node.querySelector(".runs"), format.integer(check.runs));
  setText(node.querySelector(".failures"), format.integer(check.failures));
}

function stateOf(check, severity) {
  const [tone, sign] = format.SEVERITY[severity];
  if (check.firing) return [tone, sign, `${check.firing} firing`];
  if (check.ready) return ["ok", "\u2713", "quiet"];
  return check.applies ? ["unknown", "?", "unknown"] : ["unknown", "\u2013", "not applicable"];
}
