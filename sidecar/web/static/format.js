// Numbers with units, for people. Unknown is a dash, never 0.

export const UNKNOWN = "\u2013";

const known = (value) => value !== null && value !== undefined;

/** 0.41 -> "410 ms", 12.3 -> "12.3 s", 125 -> "2 min 5 s". */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return `${digits(seconds * 1e6)} \u00b5s`;
  if (seconds < 0.9995) return `${digits(seconds * 1e3)} ms`;
  if (seconds < 59.95) return `${digits(seconds)} s`;
  return longDuration(Math.round(seconds));
}

function longDuration(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  const [size, unit] = parts[first];
  const rest = Math.floor((seconds % size) / (parts[first + 1]?.[0] ?? 1));
  const whole = `${Math.floor(seconds / size)} ${unit}`;
  return rest ? `${whole} ${rest} ${parts[first + 1][1]}` : whole;
}

/** An age in whole units, so that it does not flicker. */
export function age(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 1) return "<1 s";
  return longDuration(Math.round(seconds));
}

/** Three significant digits. */
function digits(value) {
  if (value >= 100) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** 2253619 -> "2.15 MiB". */
export function bytes(count) {
  if (!known(count)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit ? digits(value) : value} ${units[unit]}`;
}

/** 51234 -> "51,234". */
export function integer(value) {
  return known(value) ? value.toLocaleString("en-US") : UNKNOWN;
}

/** A loss or a norm. */
export function decimal(value, places = 3) {
  if (!known(value)) return UNKNOWN;
  return Math.abs(value) >= 1e5 ? value.toExponential(2) : value.toFixed(places);
}

/** 3.1 -> "3.10x". */
export function ratio(value) {
  return known(value) ? `${value.toFixed(2)}\u00d7` : UNKNOWN;
}

/** 0.27 -> "27 %". */
export function percent(value) {
  if (!known(value)) return UNKNOWN;
  return `${value > 0 && value < 0.1 ? (100 * value).toFixed(1) : Math.round(100 * value)} %`;
}

/** Local wall clock of a unix time; the date too when it is not today. */
export function clock(unixSeconds) {
  if (!known(unixSeconds)) return UNKNOWN;
  const date = new Date(unixSeconds * 1000);
  const time = date.toLocaleTimeString("en-GB");
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? time : `${isoDay(date)} ${time}`;
}

function isoDay(date) {
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

/** Seconds from a unix time to now; the clocks of two machines may differ, so never below 0. */
export function since(unixSeconds) {
  return known(unixSeconds) ? Math.max(0, Date.now() / 1000 - unixSeconds) : null;
}

/** "1 rank", "2 ranks". */
export function count(n, noun) {
  return `${integer(n)} ${noun}${n === 1 ? "" : "s"}`;
}

// Tone, sign and word: colour is never the only carrier.

export const STATUS = {
  healthy: ["ok", "\u2713", "healthy"],
  degraded: ["warning", "\u25b2", "degraded"],
  critical: ["critical", "\u2716", "critical"],
  starting: ["info", "\u25b7", "starting"],
  ended: ["unknown", "\u25cb", "ended"],
  unknown: ["unknown", "?", "unknown"],
};

/** The job's status in words: of an ended job with its exit status, where that is known. */
export function statusWords(job) {
  const isKnown = job.status === "ended" && job.exit_status !== null;
  return isKnown ? `ended, exit status ${job.exit_status}` : STATUS[job.status][2];
}

export const HEALTH = {
  ok: ["ok", "\u2713", "ok"],
  slow: ["warning", "\u25b2", "slow"],
  stuck: ["critical", "\u25a0", "stuck"],
  diverged: ["critical", "\u2260", "diverged"],
  dead: ["critical", "\u2716", "dead"],
  left: ["unknown", "\u25cb", "left"],
  standby: ["info", "\u25cc", "standing by"],
  exited: ["unknown", "\u25cb", "exited"],
  unknown: ["unknown", "?", "unknown"],
};

export const SEVERITY = {
  info: ["info", "i", "info"],
  warning: ["warning", "\u25b2", "warning"],
  critical: ["critical", "\u2716", "critical"],
};

export const CHANGE = {
  running: ["info", "\u25b6", "running"],
  committed: ["ok", "\u2713", "committed"],
  rolled_back: ["warning", "\u21b6", "rolled back"],
  failed: ["critical", "\u2716", "failed"],
};
