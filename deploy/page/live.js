// Asks /live once a second while the page is seen.

import { getJson } from "./api.js";
import { makeCharts } from "./charts.js";
import { by, make } from "./dom.js";
import { History } from "./figures.js";

const PERIOD_MS = 1000;

function health(answer) {
  const counts = {};
  for (const { state } of answer.replicas) counts[state] = (counts[state] ?? 0) + 1;
  const text = Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", ");
  return `Replicas: ${text || "none"}`;
}

function pages({ pages_free, pages_total, cache_shards }) {
  return `${pages_free} of ${pages_total}${cache_shards > 1 ? `, shared out by ${cache_shards} ranks` : ""}`;
}

function rowOf(replica) {
  const figures = replica.figures;
  const rate = figures?.generated_tokens_per_s;
  const cells = figures
    ? [figures.running, figures.waiting, rate === null ? "–" : rate.toFixed(0), pages(figures)]
    : ["–", "–", "–", "–"];
  const unproven = figures?.graph_portions_left ? `, ${figures.graph_portions_left} portions of graphs still to be proven` : "";
  const state = make("td", { class: replica.state === "serving" ? "good" : "bad cause" },
    `${replica.state}${unproven}${replica.standby === "ready" ? ", another engine stands by" : ""}${replica.cause ? `: ${replica.cause}` : ""}`);
  return make("tr", {}, make("td", {}, replica.name || "this one"), state, ...cells.map((cell) => make("td", {}, String(cell))));
}

function offer(replicas) {
  // The choice of what the charts show; it stays what it was while that is there.
  const select = by("which");
  const names = replicas.map((replica) => replica.name).filter((name) => name);
  const there = [...select.options].slice(1).map((option) => option.value);
  if (names.join() === there.join()) return;
  const before = select.value;
  select.replaceChildren(make("option", { value: "" }, "all replicas"), ...names.map((name) => make("option", { value: name }, name)));
  select.value = names.includes(before) ? before : "";
}

export function startLive({ onModel, onSelftest }) {
  // `onModel` gets what is served, null while that is not known; `onSelftest` the self-test of the replica that answers.
  const history = new History();
  const draw = makeCharts();
  let proven = null;
  const show = () => draw(history.points(by("which").value));

  async function look() {
    // Of the self-test once it has all graphs, and again when the replica that ran it is gone.
    const answer = await getJson(proven === null ? "live" : "live?selftest=false");
    if (proven === null) onSelftest(answer.selftest);
    if (!answer.selftest?.left_out) proven ??= answer.replica;
    if (!answer.replicas.some((replica) => replica.name === proven)) proven = null;
    history.add(answer);
    offer(answer.replicas);
    by("replicas").replaceChildren(...answer.replicas.map(rowOf));
    by("model-name").textContent = answer.model?.names[0] ?? "";
    by("health").textContent = health(answer);
    by("health").className = `health ${answer.total.serving ? "good" : "bad"}`;
    by("live-problem").hidden = true;
    onModel(answer.model);
    show();
  }

  function failed(error) {
    onModel(null);
    const text = error.status === 401 ? "This server asks for an API key: give it above." : error.message;
    by("health").textContent = error.status === 401 ? text : "No figures come.";
    by("health").className = "health bad";
    by("live-problem").textContent = text;
    by("live-problem").hidden = false;
  }

  async function keepLooking() {
    for (;;) {
      if (!document.hidden) await look().catch(failed);
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    }
  }

  by("which").addEventListener("change", show);
  show();
  keepLooking();
}
