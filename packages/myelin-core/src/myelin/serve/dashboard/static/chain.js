// The chain: a card for each stage, with its node, its load and how busy it is.
import { $, keyed, make, say, set } from "./dom.js";
import { bytes, count, duration, dollars, percent, rate } from "./format.js";

const TONES = {
  starting: "busy", announced: "busy", ready: "busy", loading: "busy", loaded: "busy",
  serving: "good", lost: "bad", replaced: "good", released: "idle",
};
const LOADS = { open: "opening", fetch: "fetching", compile: "compiling", load: "loading" };
const IN_BYTES = new Set(["fetch", "load"]);

/** Rows of nodes joined with those of their stages, in the order of the chain. */
function cards(tables) {
  const byNode = new Map(Object.values(tables.stages).map((stage) => [stage.node, stage]));
  return Object.values(tables.nodes)
    .map((node) => ({ node, stage: byNode.get(node.node) }))
    .sort((a, b) => a.node.stage - b.node.stage || a.node.node.localeCompare(b.node.node));
}

function layers({ first_layer: first, end_layer: end }) {
  return end - first === 1 ? `layer ${first}` : `layers ${first}–${end - 1}`;
}

export function showChain({ tables }) {
  const items = cards(tables);
  $("chain-empty").hidden = items.length > 0;
  const run = tables.run.run ?? {};
  const facts = [];
  if (items.length) facts.push(`${items.length} ${items.length === 1 ? "stage" : "stages"}`);
  if (run.provider) facts.push(`provider ${run.provider}`);
  if (run.max_context) facts.push(`context ${count(run.max_context)}`);
  if (run.places) facts.push(`${run.places} sequences at once`);
  say($("chain-sub"), facts.join(" · "));
  keyed($("chain"), items, (item) => item.node.node, create, update);
}

function create() {
  const card = make("li", { class: "stage" });
  const at = (name, element) => ((card[name] = element), element);
  card.append(
    at("hop", make("span", { class: "hop" })),
    make("div", { class: "row" }, make("h3", {}, at("name", make("span")), at("attempt", make("small"))), at("pill", make("span", { class: "pill" }))),
    at("made", make("p", { class: "made" })),
    at("load", bar("progressbar")),
    at("busy", bar("meter")),
    at("facts", make("p", { class: "facts" })),
    at("detail", make("p", { class: "detail" })),
  );
  return card;
}

function bar(role) {
  const fill = make("i");
  const meter = make("div", { class: "meter", role, "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  const row = make("div", { class: "bar-row" }, make("span"), meter, make("b"));
  return Object.assign(row, { label: row.firstChild, meter, fill, value: row.lastChild });
}

function fillBar(row, label, share, value, name) {
  row.hidden = false;
  say(row.label, label);
  say(row.value, value);
  set(row.meter, "aria-label", name);
  if (share === null) {
    row.meter.dataset.unknown = "";
    row.meter.removeAttribute("aria-valuenow");
    set(row.meter, "aria-valuetext", label);
  } else {
    delete row.meter.dataset.unknown;
    set(row.meter, "aria-valuenow", Math.round(share * 100));
    set(row.meter, "aria-valuetext", value);
    row.fill.style.width = `${share * 100}%`;
  }
}

function update(card, { node, stage }) {
  const state = node.state || "planned";
  set(card, "data-node", node.node);
  set(card, "data-state", state);
  set(card, "data-tone", TONES[state] ?? "idle");
  say(card.name, node.node);
  say(card.attempt, node.attempt > 1 ? `attempt ${node.attempt}` : "");
  say(card.pill, state);
  set(card.pill, "data-tone", TONES[state] ?? "idle");
  const made = [];
  if (stage) {
    made.push(layers(stage), stage.engine);
    if (stage.threads) made.push(`${stage.threads} ${stage.threads === 1 ? "thread" : "threads"}`);
  } else if (node.address || node.offer) made.push(node.address || node.offer);
  say(card.made, made.join(" · ") || (node.stage >= 0 ? `stage ${node.stage}` : " "));

  if (state === "loading" && node.load) {
    const known = node.total > 0;
    const unit = IN_BYTES.has(node.load) ? bytes : count;
    const share = known ? Math.min(node.done / node.total, 1) : null;
    fillBar(card.load, LOADS[node.load] ?? node.load, share, known ? `${unit(node.done || 0)} of ${unit(node.total)}` : "", `Load of ${node.node}`);
  } else card.load.hidden = true;

  if (stage && stage.busy !== undefined && state === "serving") {
    fillBar(card.busy, "busy", stage.busy, percent(stage.busy), `Busy share of ${node.node}`);
  } else card.busy.hidden = true;

  const facts = [];
  if (stage) {
    facts.push(["weights", bytes(stage.weight_bytes)], ["KV", bytes(stage.kv_bytes)]);
    if (stage.resident_bytes) facts.push(["memory", bytes(stage.resident_bytes)]);
    if (stage.step_ms) facts.push(["step", duration(stage.step_ms)]);
    if (stage.rows_per_s) facts.push(["rows/s", rate(stage.rows_per_s)]);
    if (stage.cpu) facts.push(["CPU", percent(stage.cpu)]);
    if (stage.gpu !== undefined && stage.gpu !== null) facts.push(["GPU", percent(stage.gpu)]);
    if (stage.gpu_bytes) facts.push(["GPU memory", bytes(stage.gpu_bytes)]);
    if (stage.gpu_watts) facts.push(["power", `${Math.round(stage.gpu_watts)} W`]);
    if (stage.kv_used !== undefined && stage.kv_used !== null) facts.push(["KV used", percent(stage.kv_used)]);
  }
  if (state !== "planned") facts.push(["member", state === "lost" ? "lost" : ["starting", "announced"].includes(state) ? "not yet" : state === "released" ? "left" : "alive"]);
  if (node.losses) facts.push(["losses", count(node.losses)]);
  if (node.dollars_per_hour) facts.push(["cost", `${dollars(node.dollars_per_hour)}/h`]);
  keyed(
    card.facts, facts, (fact) => fact[0],
    ([name]) => { const value = make("b"); const span = make("span", {}, `${name} `, value); span.value = value; return span; },
    (span, [, value]) => say(span.value, value),
  );
  card.facts.hidden = facts.length === 0;
  card.detail.hidden = !node.detail;
  say(card.detail, node.detail || "");
  const hop = stage?.hop_ms;
  card.hop.hidden = hop === undefined || hop === null;
  if (!card.hop.hidden) say(card.hop, duration(hop));
}
