// The page: takes snapshots and increments, and has each view draw what changed.
import { showChain } from "./chain.js";
import { showLatency, showRate } from "./charts.js";
import { $, keyed, make, say, set } from "./dom.js";
import { age, clock, count, dollars, duration, median, rate } from "./format.js";
import { showLogs } from "./logs.js";
import { showRequests } from "./requests.js";
import { apply, empty } from "./store.js";
import { showTimeline } from "./timeline.js";

const TONES = { starting: "busy", serving: "good", recovering: "warn", lost: "bad", ending: "idle", ended: "idle" };
const VIEWS = [
  { needs: ["run", "samples", "answers", "requests"], show: showFigures },
  { needs: ["nodes", "stages", "run"], show: showChain },
  { needs: ["phases", "spans", "run"], show: showTimeline },
  { needs: ["samples"], show: showRate },
  { needs: ["answers"], show: showLatency },
  { needs: ["news"], show: showNews },
  { needs: ["requests"], show: showRequests },
  { needs: ["logs"], show: showLogs },
];

let state = empty();
let offset = 0;
let changed = new Set();
let planned = false;
let source = null;

const now = () => Date.now() / 1000 + offset;

// What comes.

function connect() {
  source?.close();
  source = new EventSource("/dashboard/events");
  source.addEventListener("snapshot", (event) => {
    const body = JSON.parse(event.data);
    state = { ...empty(), ...body };
    live(body);
    changed = new Set(["everything"]);
    plan();
  });
  source.addEventListener("increment", (event) => {
    const body = JSON.parse(event.data);
    live(body);
    for (const name of apply(state, body)) changed.add(name);
    plan();
  });
  source.addEventListener("beat", (event) => live(JSON.parse(event.data)));
  source.addEventListener("bye", () => {
    source.close();
    connection("ended", "the run has ended");
  });
  source.addEventListener("error", async () => {
    if (source.readyState === EventSource.CLOSED && !(await signedIn())) return location.assign("/dashboard/sign-in");
    connection("reconnecting", "reconnecting");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  });
}

async function signedIn() {
  try {
    return (await fetch("/dashboard/state")).status !== 401;
  } catch {
    return true;
  }
}

function live(body) {
  offset = body.now - Date.now() / 1000;
  connection("live", "live");
}

function connection(name, text) {
  const element = $("connection");
  set(element, "data-state", name);
  say(element, text);
}

// What is shown.

function plan() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    const due = changed;
    changed = new Set();
    const all = due.has("everything");
    for (const view of VIEWS) {
      if (all || view.needs.some((name) => due.has(name))) view.show(state, view.show === showLogs ? all : now());
    }
  });
}

function showFigures({ tables, rings }) {
  const run = tables.run.run ?? {};
  const status = run.state || "starting";
  say($("model"), modelName(run.model ?? ""));
  set($("model"), "title", run.model ?? "");
  say($("run-id"), run.id ?? "");
  say($("version"), run.version ?? "");
  say($("run-state"), status);
  set($("run-state"), "data-tone", TONES[status] ?? "idle");
  const since = status === "serving" || status === "recovering" ? run.serving_since : run.began;
  const until = run.ended ?? now();
  say($("run-since"), since ? `${status === "serving" ? "for " : "since "}${status === "serving" ? age(until - since) : clock(since)}${run.recoveries ? `, ${run.recoveries} × recovered` : ""}` : "");
  document.title = `${status} · Myelin`;

  const sample = rings.samples.at(-1);
  say($("figure-rate"), sample ? rate(sample.tokens_per_s) : "–");
  say($("figure-total"), `${count(run.tokens)} tokens so far`);
  const latest = rings.answers.slice(-20);
  say($("figure-ttft"), duration(median(latest.map((answer) => answer.ttft_ms))));
  say($("figure-token"), duration(median(latest.map((answer) => answer.token_ms))));
  const rows = Object.values(tables.requests);
  const running = rows.filter((row) => row.state === "running").length;
  const waiting = rows.filter((row) => row.state === "waiting").length;
  say($("figure-requests"), `${count(running)} running`);
  say($("figure-requests-sub"), `${count(waiting)} waiting, ${count(run.done)} done${run.failed ? `, ${count(run.failed)} failed` : ""}`);
  $("spend").hidden = !run.dollars_per_hour && !run.dollars;
  say($("figure-spend"), dollars(run.dollars ?? 0));
  say($("figure-spend-sub"), `${dollars(run.dollars_per_hour ?? 0)} an hour`);

  const banner = $("banner");
  const text = status === "recovering" ? `A node was lost and is being replaced${run.detail ? `: ${run.detail}` : ""}. Requests go on after that.` : status === "lost" ? `The run is lost${run.detail ? `: ${run.detail}` : ""}.` : "";
  banner.hidden = !text;
  say(banner, text);
  set(banner, "data-tone", status === "lost" ? "bad" : "warn");
}

/** The last part of a model's source, which people know it by. */
function modelName(source) {
  return source.split("/").pop().split("@")[0] || "…";
}

function showNews({ rings }) {
  const items = rings.news.slice(-40).reverse();
  $("news-empty").hidden = items.length > 0;
  keyed(
    $("news"), items, (item) => `${item.t} ${item.text}`,
    (item) => make("li", { "data-tone": item.tone }, make("time", {}, clock(item.t)), make("span", {}, item.text)),
    () => {},
  );
}

// What the person does.

function theme() {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = dark === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  remember("myelin-theme", next);
}

function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // Storage may be forbidden; it holds for this visit then.
  }
}

function recall(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function go(id) {
  const section = $(id);
  section.scrollIntoView({ block: "start" });
  section.focus({ preventScroll: true });
}

const KEYS = {
  1: () => go("chain-section"),
  2: () => go("timeline-section"),
  3: () => go("requests-section"),
  4: () => go("logs-section"),
  "/": () => $("logs-text").focus(),
  f: () => $("logs-follow").click(),
  t: theme,
  "?": () => $("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape" && event.target.id === "logs-text") {
    event.target.value = "";
    showLogs(state, true);
    $("logs").focus();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || field || $("help").open || !$("keys-on").checked) return;
  const action = KEYS[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
});

$("theme").addEventListener("click", theme);
$("help-open").addEventListener("click", () => $("help").showModal());
$("keys-on").checked = recall("myelin-keys") !== "off";
$("keys-on").addEventListener("change", (event) => remember("myelin-keys", event.target.checked ? "on" : "off"));
for (const id of ["logs-node", "logs-stream"]) $(id).addEventListener("change", () => showLogs(state, true));
$("logs-text").addEventListener("input", () => showLogs(state, true));
$("logs-follow").addEventListener("change", () => showLogs(state));
$("logs").addEventListener("wheel", (event) => {
  if (event.deltaY < 0) $("logs-follow").checked = false;
}, { passive: true });
$("requests-filter").addEventListener("change", () => showRequests(state, now()));
$("requests-more").addEventListener("click", ({ currentTarget: button }) => {
  button.ariaExpanded = button.ariaExpanded === "true" ? "false" : "true";
  showRequests(state, now());
});
addEventListener("resize", () => {
  changed.add("samples");
  changed.add("answers");
  plan();
});

// Ages and bars that grow are redrawn each second, unless nobody looks.
setInterval(() => {
  if (document.hidden) return;
  const status = state.tables.run.run?.state;
  changed.add("requests");
  if (status === "starting" || status === "recovering") changed.add("phases");
  plan();
}, 1000);

connect();
