// The token that the page was opened with, carried on to whatever it asks or links to.

const token = new URLSearchParams(location.search).get("token");

/** The search part of an address: "?token=..." or nothing. */
export const tokenQuery = token === null ? "" : `?token=${encodeURIComponent(token)}`;
