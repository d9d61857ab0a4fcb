// Two plots, drawn by hand as SVG; each has a label that says in words what it shows.
import { $, draw, say } from "./dom.js";
import { clock, duration, rate } from "./format.js";

const HEIGHT = 184;
const LEFT = 44;
const BOTTOM = 18;
const TOP = 6;

/** A round number at or above the highest value. */
function ceiling(highest) {
  if (highest <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(highest));
  for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (step * power >= highest) return step * power;
  return 10 * power;
}

/** The frame of a plot: its drawing, and where values go. */
function frame(container, from, to, top, unit) {
  const width = Math.max(container.clientWidth, 200);
  const inner = { width: width - LEFT - 8, height: HEIGHT - BOTTOM - TOP };
  const x = (time) => LEFT + ((time - from) / Math.max(to - from, 1)) * inner.width;
  const y = (value) => TOP + inner.height - (Math.min(value, top) / top) * inner.height;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
  for (const share of [0, 0.5, 1]) {
    const at = y(top * share);
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - 8, y1: at, y2: at }));
    svg.append(draw("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, unit(top * share)));
  }
  for (const [time, anchor] of [[from, "start"], [(from + to) / 2, "middle"], [to, "end"]]) {
    svg.append(draw("text", { x: x(time), y: HEIGHT - 3, "text-anchor": anchor }, clock(time)));
  }
  return { svg, x, y, floor: TOP + inner.height };
}

function place(container, svg, label) {
  svg.setAttribute("aria-label", label);
  container.replaceChildren(svg);
}

export function showRate({ rings }) {
  const samples = rings.samples.slice(-300);
  const container = $("rate-chart");
  const now = samples.at(-1)?.t ?? Date.now() / 1000;
  const from = Math.min(samples[0]?.t ?? now - 60, now - 60);
  const highest = Math.max(0, ...samples.map((sample) => sample.tokens_per_s));
  const { svg, x, y, floor } = frame(container, from, now, ceiling(highest), (value) => (value === 0 ? "0" : rate(value)));
  if (samples.length) {
    const points = samples.map((sample) => `${x(sample.t).toFixed(1)} ${y(sample.tokens_per_s).toFixed(1)}`);
    const line = `M${points.join("L")}`;
    svg.append(draw("path", { class: "fill", d: `${line}L${x(now).toFixed(1)} ${floor}L${x(samples[0].t).toFixed(1)} ${floor}Z` }));
    svg.append(draw("path", { class: "line", d: line }));
  }
  const busy = samples.filter((sample) => sample.tokens_per_s > 0);
  const mean = busy.length ? busy.reduce((sum, sample) => sum + sample.tokens_per_s, 0) / busy.length : 0;
  const last = samples.at(-1)?.tokens_per_s ?? 0;
  say($("rate-sub"), busy.length ? `${rate(last)} now, ${rate(mean)} where any, ${rate(highest)} at most` : "none yet");
  place(container, svg, `Tokens per second over ${duration((now - from) * 1000)}: now ${rate(last)}, mean where any ${rate(mean)}, highest ${rate(highest)}`);
}

export function showLatency({ rings }, now) {
  const answers = rings.answers.slice(-120);
  const container = $("latency-chart");
  const from = Math.min(answers[0]?.t ?? now - 60, now - 60);
  const top = ceiling(Math.max(1, ...answers.flatMap((answer) => [answer.ttft_ms ?? 0, answer.token_ms ?? 0])));
  const { svg, x, y } = frame(container, from, now, top, (value) => (value === 0 ? "0" : duration(value)));
  for (const answer of answers) {
    if (answer.token_ms !== null) svg.append(draw("circle", { class: "ring", cx: x(answer.t), cy: y(answer.token_ms), r: 3 }));
    if (answer.ttft_ms !== null) svg.append(draw("circle", { class: "dot", cx: x(answer.t), cy: y(answer.ttft_ms), r: 3.25 }));
  }
  const last = answers.at(-1);
  place(container, svg, last
    ? `Latency of the last ${answers.length} answers; the latest: first token after ${duration(last.ttft_ms)}, then ${duration(last.token_ms)} for each`
    : "Latency: no answers yet");
}
