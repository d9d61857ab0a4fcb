// The requests, the latest first.
import { $, keyed, make, say, set } from "./dom.js";
import { age, count, duration, rate } from "./format.js";

const TONES = { waiting: "warn", running: "busy", done: "good", cancelled: "idle", failed: "bad" };
const FEW = 12;

export function showRequests({ tables }, now) {
  const wanted = $("requests-filter").value;
  const all = Object.values(tables.requests);
  const found = all.filter((row) => !wanted || row.state === wanted).sort((a, b) => b.number - a.number);
  const more = $("requests-more");
  const rows = more.ariaExpanded === "true" ? found : found.slice(0, FEW);
  more.hidden = found.length <= FEW;
  say(more, more.ariaExpanded === "true" ? "Show fewer" : `Show ${count(found.length - FEW)} more`);
  $("requests-empty").hidden = rows.length > 0;
  say($("requests-empty"), all.length ? "None of these." : "No requests yet.");
  $("requests").closest("table").hidden = rows.length === 0;
  keyed($("requests"), rows, (row) => row.number, create, (element, row) => update(element, row, now));
}

function create() {
  const cells = ["", "", "number", "number", "number wide", "number", "number", "number wide", "number wide"].map((kind) => make("td", kind ? { class: kind } : {}));
  const row = make("tr", {}, ...cells);
  row.cells_ = cells;
  row.name = make("span");
  row.source = make("span", { class: "source" });
  row.label = make("span", { class: "label" });
  row.pill = make("span", { class: "pill" });
  cells[0].append(row.name, " ", row.source, row.label);
  cells[1].append(row.pill);
  return row;
}

function update(element, row, now) {
  const cells = element.cells_;
  set(element, "data-state", row.state);
  say(element.name, String(row.number));
  say(element.source, row.source);
  say(element.label, row.label);
  set(element.label, "title", row.label);
  say(element.pill, row.state === "done" && row.outcome === "length" ? "done (length)" : row.state);
  set(element.pill, "data-tone", TONES[row.state] ?? "idle");
  if (row.detail) set(element.pill, "title", row.detail);
  say(cells[2], row.prompt_tokens ? count(row.prompt_tokens) : "–");
  say(cells[3], row.state === "running" && row.max_tokens ? `${count(row.tokens)} of ${count(row.max_tokens)}` : count(row.tokens));
  say(cells[4], duration(row.queue_ms));
  say(cells[5], duration(row.ttft_ms));
  say(cells[6], duration(row.token_ms));
  say(cells[7], row.token_ms ? rate(1000 / row.token_ms) : "–");
  say(cells[8], age(Math.max(now - (row.ended ?? row.arrived), 0)));
}
