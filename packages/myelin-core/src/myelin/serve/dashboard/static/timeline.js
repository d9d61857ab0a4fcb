// The bootstrap as a waterfall: each phase, and below it what each attempt of each node was at.
import { $, keyed, make, say, set } from "./dom.js";
import { clock, duration, words } from "./format.js";

const SPAN_WORDS = { start: "starting", connect: "connecting", ready: "waiting", prepare: "preparing", load: "loading", open: "opening", fetch: "fetching", compile: "compiling", loaded: "loaded" };
const OUTSIDE = new Set(["serving", "recovery", "shutdown", "provider_stop"]);

/** Rows of the chart, each with its pieces in Unix seconds. */
function rows(tables, now) {
  const phases = Object.entries(tables.phases)
    .map(([name, phase]) => ({ name, ...phase }))
    .filter((phase) => !OUTSIDE.has(phase.name))
    .sort((a, b) => a.order - b.order);
  const serving = tables.phases.serving;
  const found = phases.map((phase) => {
    const ended = phase.state === "started" ? now : phase.began + phase.seconds;
    return {
      key: `phase ${phase.name}`, kind: "phase", group: 0, state: phase.state, name: words(phase.name), detail: phase.detail,
      pieces: [{ name: phase.name, began: phase.began, ended }], seconds: ended - phase.began,
    };
  });
  const attempts = new Map();
  for (const span of Object.values(tables.spans)) {
    const key = `${span.node}#${span.attempt}`;
    if (!attempts.has(key)) attempts.set(key, { key, node: span.node, attempt: span.attempt, spans: [] });
    attempts.get(key).spans.push(span);
  }
  for (const { key, node, attempt, spans } of attempts.values()) {
    const pieces = spans.map((span) => ({ name: span.name, began: span.began, ended: span.ended ?? now, lost: span.lost }));
    const began = Math.min(...pieces.map((piece) => piece.began));
    const ended = Math.max(...pieces.map((piece) => piece.ended));
    const later = serving && began > serving.began;
    found.push({
      key: `node ${key}`, kind: "node", group: later ? 2 : 1, state: spans.some((span) => span.ended === null) ? "running" : "done",
      name: attempt > 1 ? `${node} · ${attempt}` : node, pieces, began, seconds: ended - began, detail: "",
    });
  }
  return found;
}

/** From when to when a group of rows is drawn. */
function windowOf(items) {
  const from = Math.min(...items.flatMap((row) => row.pieces.map((piece) => piece.began)));
  const to = Math.max(...items.flatMap((row) => row.pieces.map((piece) => piece.ended)));
  return { from, to: Math.max(to, from + 0.5) };
}

export function showTimeline({ tables }, now) {
  const all = rows(tables, now);
  const bootstrap = all.filter((row) => row.group < 2);
  const later = all.filter((row) => row.group === 2).sort((a, b) => b.began - a.began).slice(0, 8);
  const list = [];
  if (bootstrap.length) {
    const window = windowOf(bootstrap);
    list.push({ key: "scale", kind: "scale", seconds: window.to - window.from });
    for (const row of bootstrap.filter((row) => row.group === 0)) list.push({ ...row, window });
    if (bootstrap.some((row) => row.group === 1)) {
      list.push({ key: "group nodes", kind: "group", name: "Nodes" });
      for (const row of bootstrap.filter((row) => row.group === 1)) list.push({ ...row, window });
    }
  }
  if (later.length) {
    list.push({ key: "group later", kind: "group", name: "Replacements since" });
    for (const row of later) list.push({ ...row, window: windowOf([row]), name: `${row.name} · ${clock(row.began)}` });
  }
  $("timeline-key").hidden = !list.some((row) => row.kind === "node");
  keyed($("timeline"), list, (row) => row.key, create, update);
  const run = tables.run.run ?? {};
  const said = run.bootstrap_s ? `ready in ${duration(run.bootstrap_s * 1000)}` : run.began ? `for ${duration((now - run.began) * 1000)}` : "";
  say($("timeline-sub"), said);
}

function create(row) {
  if (row.kind === "group") return make("li", { class: "group" });
  if (row.kind === "scale") return make("li", { class: "scale", "aria-hidden": "true" }, make("span"), make("span"), make("span"));
  const element = make("li", { class: "bar", "data-kind": row.kind });
  element.name = make("span", { class: "name" });
  element.track = make("span", { class: "track", "aria-hidden": "true" });
  element.took = make("span", { class: "took" });
  element.said = make("span", { class: "hidden" });
  element.append(element.name, element.track, element.took, element.said);
  return element;
}

function update(element, row) {
  if (row.kind === "group") return say(element, row.name);
  if (row.kind === "scale") {
    const middle = element.children[1];
    if (middle.childElementCount !== 3) middle.replaceChildren(make("span", {}, "0"), make("span"), make("span"));
    say(middle.children[1], duration(row.seconds * 500));
    return say(middle.children[2], duration(row.seconds * 1000));
  }
  set(element, "data-state", row.state);
  say(element.name, row.name);
  say(element.took, duration(row.seconds * 1000));
  const parts = row.kind === "node" ? row.pieces.map((piece) => `${SPAN_WORDS[piece.name] ?? piece.name} ${duration((piece.ended - piece.began) * 1000)}`) : [];
  const said = [row.state === "started" || row.state === "running" ? "under way" : row.state === "failed" ? `failed ${row.detail}` : "", ...parts].filter(Boolean).join(", ");
  say(element.said, said);
  if (said) set(element, "title", said);
  const { from, to } = row.window;
  keyed(
    element.track, row.pieces, (piece) => piece.name,
    (piece) => make("i", { "data-name": piece.name }),
    (bar, piece) => {
      bar.style.left = `${((piece.began - from) / (to - from)) * 100}%`;
      bar.style.width = `${((piece.ended - piece.began) / (to - from)) * 100}%`;
      set(bar, "data-lost", Boolean(piece.lost));
    },
  );
}
