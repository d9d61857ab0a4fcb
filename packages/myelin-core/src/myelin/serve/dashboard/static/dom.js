// Small helpers: elements by hand, and lists that keep their elements.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An element: `make("li", { class: "a" }, "text", child)`. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set a text, only where it differs: nothing is redrawn, and no selection lost, for the same words. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute, only where it differs. */
export function set(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Make a container's children those of `items`, in order; the element of a key stays the same one.
 * `create(item)` makes one, `update(element, item)` brings it up to date.
 */
export function keyed(container, items, key, create, update) {
  const known = (container.known ??= new Map());
  const wanted = new Set();
  let place = container.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    wanted.add(name);
    let element = known.get(name);
    if (!element) {
      element = create(item);
      known.set(name, element);
    }
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else container.insertBefore(element, place);
  }
  for (const [name, element] of known) {
    if (!wanted.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
}
