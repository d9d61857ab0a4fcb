// What the nodes wrote, with a filter. Structured lines (JSON with an event) are shown as their event and fields.
import { $, make, say } from "./dom.js";
import { clock, count } from "./format.js";

const SHOWN = 400;
const LEFT_OUT = new Set(["event", "level", "timestamp", "node", "attempt", "logger"]);

let drawn = { upTo: null, filter: null, count: 0 };

function filter() {
  return { node: $("logs-node").value, stream: $("logs-stream").value, text: $("logs-text").value.trim().toLowerCase() };
}

function matches(line, { node, stream, text }) {
  return (!node || line.node === node) && (!stream || line.stream === stream) && (!text || line.text.toLowerCase().includes(text));
}

/** Offer what there is to choose from, without taking a choice away. */
function offer(select, values) {
  const known = new Set([...select.options].map((option) => option.value));
  for (const value of values) if (!known.has(value)) select.append(make("option", { value }, value));
}

export function showLogs({ rings, tables }, force = false) {
  const lines = rings.logs;
  offer($("logs-node"), [...new Set(lines.map((line) => line.node))].sort());
  offer($("logs-stream"), [...new Set(lines.map((line) => line.stream))].sort());
  const chosen = filter();
  const found = lines.filter((line) => matches(line, chosen));
  const container = $("logs");
  const same = !force && JSON.stringify(chosen) === drawn.filter && drawn.upTo !== null;
  const start = same ? found.indexOf(drawn.upTo) + 1 : 0;
  const added = found.slice(Math.max(start, found.length - SHOWN));
  if (!same || (start === 0 && found.length)) container.replaceChildren();
  container.append(...added.map((line) => render(line, chosen.text)));
  while (container.childElementCount > SHOWN) container.firstElementChild.remove();
  if (!container.childElementCount) container.append(make("p", { class: "empty" }, lines.length ? "No line matches." : "No lines yet."));
  else if (container.firstElementChild.tagName === "P" && container.childElementCount > 1) container.firstElementChild.remove();
  drawn = { upTo: found.at(-1) ?? null, filter: JSON.stringify(chosen) };
  const dropped = tables.run.run?.lines_dropped;
  say($("logs-count"), `${count(found.length)} of ${count(lines.length)} lines${dropped ? `, ${count(dropped)} more left out` : ""}`);
  if ($("logs-follow").checked) container.scrollTop = container.scrollHeight;
}

function render(line, sought) {
  const { level, head, fields } = parse(line.text);
  const what = make("span", { class: "what" });
  what.append(...marked(head, sought));
  if (fields) what.append(make("em", {}, "  ", ...marked(fields, sought)));
  return make("div", { "data-level": level || null, "data-node": line.node, "data-stream": line.stream }, make("time", {}, clock(line.t)), make("span", { class: "who" }, `${line.node} ${line.stream === "stderr" ? "err" : line.stream === "stdout" ? "out" : line.stream}`), what);
}

/** A structured line's level, event and other fields; any other line as it is. */
function parse(text) {
  if (!text.startsWith("{")) return { level: "", head: text, fields: "" };
  try {
    const entry = JSON.parse(text);
    if (typeof entry.event !== "string") return { level: "", head: text, fields: "" };
    const rest = Object.entries(entry).filter(([name]) => !LEFT_OUT.has(name));
    return { level: entry.level, head: entry.event, fields: rest.map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`).join(" ") };
  } catch {
    return { level: "", head: text, fields: "" };
  }
}

/** A text in pieces, with what was sought marked. */
function marked(text, sought) {
  if (!sought) return [text];
  const pieces = [];
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(sought); at >= 0; at = lower.indexOf(sought, from)) {
    pieces.push(text.slice(from, at), make("mark", {}, text.slice(at, at + sought.length)));
    from = at + sought.length;
  }
  pieces.push(text.slice(from));
  return pieces;
}
