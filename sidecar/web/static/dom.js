// Building and updating elements. Text only ever enters through textContent.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with a class, and children that are nodes or text. */
export function el(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** Set text only when it differs: an untouched node keeps selection and stays quiet for readers. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A coloured word with its sign. */
export function setBadge(node, [tone, sign, word]) {
  node.dataset.tone = tone;
  setText(node, `${sign} ${word}`);
}

/**
 * Make the children of `parent` follow `items`. A child keeps its element as long as its key
 * stays, so that focus, selection and open details survive every update.
 */
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let node = old.get(key);
    if (node === undefined) {
      node = create(item);
      node.dataset.key = key;
    }
    old.delete(key);
    update(node, item);
    const here = parent.children[index] ?? null;
    if (here !== node) parent.insertBefore(node, here);
  });
  for (const node of old.values()) node.remove();
}

/** Show the reason for an empty panel, or hide it. */
export function setEmpty(node, text) {
  node.hidden = text === null;
  if (text !== null) setText(node, text);
}
