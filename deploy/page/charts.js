// Small charts of the last two minutes.

import { by, make, makeSvg } from "./dom.js";
import { falls, KEPT_S, KINDS, lines, roundUp } from "./figures.js";

const whole = (value) => value.toFixed(0);
const rate = (value) => (value < 10 ? value.toFixed(1) : value.toFixed(0));
const milliseconds = (value) => `${value < 10 ? value.toFixed(2) : value.toFixed(0)} ms`;
const share = (value) => `${(100 * value).toFixed(0)} %`;
const milli = (seconds) => (seconds === null || seconds === undefined ? null : 1000 * seconds);
const stepTime = (kind) => (figures) => milli(figures.steps[kind]?.seconds);

const CHARTS = [
  { title: "Tokens a second", form: rate, series: {
    generated: (figures) => figures.generated_tokens_per_s, prompt: (figures) => figures.prompt_tokens_per_s } },
  { title: "Requests", form: whole, series: {
    running: (figures) => figures.running, waiting: (figures) => figures.waiting } },
  { title: "Steps a second", form: rate, series: Object.fromEntries(
    KINDS.map((kind) => [kind, (figures) => figures.steps[kind]?.per_second ?? 0])) },
  { title: "Decode rows of a step", form: rate, series: {
    decode: (figures) => figures.steps.decode?.decode_rows ?? null,
    mixed: (figures) => figures.steps.mixed?.decode_rows ?? null } },
  { title: "Time of a step", form: milliseconds, series: {
    ...Object.fromEntries(KINDS.map((kind) => [kind, stepTime(kind)])),
    // What the device needs at the least to read what a step of decode rows reads.
    "decode's floor": (figures) => milli(figures.steps.decode?.floor_seconds) } },
  { title: "Pages in use", form: whole, top: (figures) => figures.pages_total, series: {
    used: (figures) => figures.pages_total - figures.pages_free } },
  { title: "Drafts that were accepted", form: share, top: () => 1, series: { share: (figures) => figures.drafts_accepted } },
  { title: "Steps from graphs", form: share, top: () => 1, series: {
    share: (figures) => (figures.without_graphs ? null : figures.graph_hit_rate) },
    none: (figures) => (figures.without_graphs ? "no graphs on this device" : "") },
];

class Chart {
  // One chart; its figure is in the document.
  constructor(kind) {
    this.kind = kind;
    this.most = make("span", { class: "most" });
    this.values = make("ul", { class: "values" });
    this.paths = Object.keys(kind.series).map((_, place) => makeSvg("path", { class: `series series-${place}` }));
    this.svg = makeSvg("svg", { viewBox: `0 -0.03 ${KEPT_S} 1.06`, preserveAspectRatio: "none", role: "img" },
      makeSvg("line", { class: "base", x1: 0, x2: KEPT_S, y1: 1, y2: 1, "stroke-width": 0.01 }), ...this.paths);
    const caption = make("figcaption", {}, kind.title, this.most);
    this.figure = make("figure", { class: "chart" }, caption, this.svg, this.values);
  }

  draw(points) {
    const { kind } = this;
    const last = points.at(-1)?.figures ?? null;
    const all = points.flatMap(({ figures }) => (figures ? Object.values(kind.series).map((of) => of(figures) ?? 0) : []));
    const most = (last && kind.top?.(last)) || roundUp(Math.max(0, ...all));
    const none = last ? kind.none?.(last) : "";
    const texts = Object.entries(kind.series).map(([name, of], place) => {
      this.paths[place].setAttribute("d", lines(points, of, most));
      const value = last ? of(last) : null;
      return `${name} ${value === null || value === undefined ? "–" : kind.form(value)}`;
    });
    this.most.textContent = kind.form(most);
    this.svg.setAttribute("aria-label", `${kind.title}: ${none || texts.join(", ")}`);
    this.values.replaceChildren(...(none ? [make("li", {}, none)]
      : texts.map((text, place) => make("li", { class: `series-${place}` }, text))));
  }
}

class Acceptance {
  // Bars, one for each position of a draft; behind their values how often acceptance has fallen, if it has.
  constructor() {
    this.svg = makeSvg("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", role: "img" });
    this.values = make("ul", { class: "values" });
    const caption = make("figcaption", {}, "Acceptance by position", make("span", { class: "most" }, "100 %"));
    this.figure = make("figure", { class: "chart" }, caption, this.svg, this.values);
  }

  draw(points) {
    const last = points.at(-1)?.figures ?? null;
    const shares = last?.acceptance ?? [];
    const width = 100 / Math.max(shares.length, 4);
    const texts = [...shares.map((value, place) => `draft ${place + 1}: ${share(value ?? 0)}`), ...falls(last)];
    this.svg.replaceChildren(...shares.map((value, place) => makeSvg("rect", {
      class: "place", x: place * width + width * 0.1, width: width * 0.8, y: 1 - (value ?? 0), height: value ?? 0 })));
    this.svg.setAttribute("aria-label", `Acceptance by position: ${texts.join(", ") || "no drafts"}`);
    this.values.replaceChildren(...(texts.length ? texts : ["no drafts"]).map((text) => make("li", {}, text)));
  }
}

export function makeCharts() {
  // A function that draws the points of `History` into the page.
  const charts = [...CHARTS.map((kind) => new Chart(kind)), new Acceptance()];
  by("charts").replaceChildren(...charts.map((chart) => chart.figure));
  return (points) => charts.forEach((chart) => chart.draw(points));
}
