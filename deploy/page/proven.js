// What the self-test found, bucket by bucket.

import { by, make } from "./dom.js";

const text = (value, form = String) => (value === null || value === undefined ? "–" : form(value));

function rowOf(bucket) {
  const verdict = make("td", { class: bucket.passed ? "good" : "bad" }, bucket.passed ? "passed" : bucket.problems.join("; "));
  const cells = [
    text(bucket.rows),
    text(bucket.drafts),
    text(bucket.accepted),
    text(bucket.logits_error, (value) => value.toExponential(1)),
    text(bucket.step_seconds, (value) => (1000 * value).toFixed(2)),
  ];
  return make("tr", {}, make("td", {}, bucket.kind), make("td", {}, bucket.bucket), verdict, ...cells.map((cell) => make("td", {}, cell)));
}

export function showProof(report) {
  // `report`: what GET /selftest answers; null where no self-test ran.
  by("proof-region").hidden = !report;
  if (!report) {
    by("proof-summary").textContent = "No self-test ran when this replica started: the setting engine.selftest is false.";
    return;
  }
  const when = new Date(1000 * report.began).toLocaleString();
  by("proof-summary").textContent = `${report.summary}, on ${report.device}, ${when}.`;
  by("proof").replaceChildren(...report.buckets.map(rowOf));
}
