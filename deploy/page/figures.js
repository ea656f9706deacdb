// What /live says, added up over replicas, and kept for two minutes.

export const KEPT_S = 120;
export const KINDS = ["decode", "prefill", "mixed"];

const sum = (list, of) => list.reduce((total, item) => total + (of(item) ?? 0), 0);

function mean(list, of, weight) {
  // Weighted, over those that have a value; null where none has.
  const known = list.filter((item) => of(item) !== null && of(item) !== undefined && weight(item) > 0);
  const total = sum(known, weight);
  return total > 0 ? sum(known, (item) => of(item) * weight(item)) / total : null;
}

export function combine(replicas) {
  // The figures of several replicas as those of one; null where none has any.
  const all = replicas.map((replica) => replica.figures).filter((figures) => figures);
  if (!all.length) return null;
  const steps = {};
  for (const kind of KINDS) {
    const some = all.map((figures) => figures.steps[kind]).filter((step) => step);
    const rate = (step) => step.per_second;
    if (some.length) {
      steps[kind] = {
        per_second: sum(some, rate),
        seconds: mean(some, (step) => step.seconds, rate),
        decode_rows: mean(some, (step) => step.decode_rows, rate),
        prefill_tokens: mean(some, (step) => step.prefill_tokens, rate),
        floor_seconds: mean(some, (step) => step.floor_seconds, rate),
      };
    }
  }
  const positions = Math.max(...all.map((figures) => figures.acceptance.length));
  return {
    running: sum(all, (figures) => figures.running),
    waiting: sum(all, (figures) => figures.waiting),
    slots: sum(all, (figures) => figures.slots),
    pages_total: sum(all, (figures) => figures.pages_total),
    pages_free: sum(all, (figures) => figures.pages_free),
    generated_tokens_per_s: sum(all, (figures) => figures.generated_tokens_per_s),
    prompt_tokens_per_s: sum(all, (figures) => figures.prompt_tokens_per_s),
    steps,
    acceptance: Array.from({ length: positions }, (_, place) =>
      mean(all, (figures) => figures.acceptance[place] ?? null, () => 1)),
    acceptance_falls: sum(all, (figures) => figures.acceptance_falls),
    drafts_accepted: mean(all, (figures) => figures.drafts_accepted, (figures) => figures.steps_per_s ?? 0),
    graph_hit_rate: mean(all, (figures) => figures.graph_hit_rate, (figures) => figures.steps_per_s ?? 0),
    without_graphs: all.every((figures) => "no graphs" in figures.eager_steps),
  };
}

export function falls(figures) {
  // What to say of the times at which acceptance fell to half of what it was; nothing where it never did.
  const count = figures?.acceptance_falls ?? 0;
  return count > 0 ? [`fell to half of what was usual: ${count === 1 ? "once" : `${count} times`}`] : [];
}

export class History {
  // Answers of /live, the newest last.
  #kept = [];

  add(answer) {
    if (this.#kept.length && answer.at <= this.#kept.at(-1).at) return; // the same one again
    this.#kept.push(answer);
    while (answer.at - this.#kept[0].at > KEPT_S) this.#kept.shift();
  }

  points(name) {
    // [{age, figures}] with `age` in seconds before the newest, of one replica or, without a name, of all that serve.
    const newest = this.#kept.at(-1)?.at ?? 0;
    return this.#kept.map(({ at, replicas }) => {
      const chosen = replicas.filter((one) => (name ? one.name === name : one.state === "serving"));
      return { age: newest - at, figures: combine(chosen) };
    });
  }
}

export function lines(points, of, most) {
  // The values as SVG path data in a box of KEPT_S by 1, y downwards; a new line begins behind every gap.
  let path = "";
  let before = null;
  for (const { age, figures } of points) {
    const value = figures ? of(figures) : null;
    if (value === null || value === undefined) {
      before = null;
      continue;
    }
    const joined = before !== null && before - age < 5;
    path += `${joined ? "L" : "M"}${(KEPT_S - age).toFixed(2)} ${(1 - value / most).toFixed(4)}`;
    before = age;
  }
  return path;
}

export function roundUp(value) {
  // The least of 1, 2, 5, 10, 20 … that is not below, for the top of a chart.
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}
