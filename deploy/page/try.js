// The form that asks the model, and the answers as they come.

import { streamJson } from "./api.js";
import { by, make } from "./dom.js";
import { Turn, watchTokens } from "./transcript.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const TOP = 5;

let model = null;
let turns = [];
let stopping = null;
let chosen = false;

const form = () => by("ask");
const chatting = () => form().elements.mode.value === "chat";

export function served(now) {
  // What /live says of the model; null while that is not known.
  if (now && !model && !now.chat && !chosen) {
    form().elements.mode.value = "completion"; // without a chat template there is no chat
    showMode();
  }
  model = now;
}

function showMode() {
  by("prompt-label").textContent = chatting() ? "Message" : "Text to continue";
  by("send").textContent = chatting() ? "Send" : "Complete";
  for (const element of document.querySelectorAll(".chat-only")) element.hidden = !chatting();
}

function sampling(fields) {
  const body = {};
  for (const name of NUMBERS) {
    if (fields[name].value !== "") body[name] = fields[name].valueAsNumber;
  }
  if (fields.stop_text.value) body.stop = fields.stop_text.value.replaceAll("\\n", "\n");
  return body;
}

function request(prompt, fields) {
  // The path and the body of a request.
  const top = Math.min(TOP, model.max_logprobs);
  const body = {
    model: model.names[0],
    ...sampling(fields),
    stream_options: { include_usage: true },
    ...(fields.details.checked ? { return_accepted_drafts: true } : {}),
  };
  if (!chatting()) {
    return ["v1/completions", { ...body, prompt, ...(fields.details.checked ? { logprobs: top } : {}) }];
  }
  const messages = turns.filter((turn) => turn.role).map((turn) => ({ role: turn.role, content: turn.text }));
  if (fields.system.value) messages.unshift({ role: "system", content: fields.system.value });
  const details = fields.details.checked ? { logprobs: true, top_logprobs: top } : {};
  return ["v1/chat/completions", { ...body, messages, ...details }];
}

function add(who, role = "") {
  const turn = Object.assign(new Turn(who), { role });
  turns.push(turn);
  by("transcript").append(turn.element);
  return turn;
}

function keepEndInView() {
  const box = by("transcript");
  const away = box.scrollHeight - box.scrollTop - box.clientHeight;
  return () => {
    if (away < 40) box.scrollTop = box.scrollHeight; // a reader who scrolled up stays there
  };
}

function told(seconds, first, usage, tokens, finish) {
  // The line under an answer.
  const count = usage?.completion_tokens ?? tokens.length;
  const drafted = tokens.filter((token) => token.drafted).length;
  const parts = [`${count} tokens in ${seconds.toFixed(2)} s`];
  if (first !== null) parts.push(`the first after ${(1000 * first).toFixed(0)} ms`);
  if (first !== null && count > 1) parts.push(`then ${((count - 1) / Math.max(seconds - first, 1e-3)).toFixed(0)} tokens a second`);
  if (tokens.length) parts.push(`${drafted} from accepted drafts`);
  if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} prompt tokens cached`);
  return `${parts.join(", ")}. ${finish ? `Ended by: ${finish}.` : "Stopped."}`;
}

async function ask(prompt) {
  const fields = form().elements;
  add(chatting() ? "You" : "Text", chatting() ? "user" : "").write(prompt);
  const [path, body] = request(prompt, fields);
  const answer = add(chatting() ? "Model" : "Continuation");
  by("transcript").scrollTop = by("transcript").scrollHeight;
  by("transcript").setAttribute("aria-busy", "true");
  stopping = new AbortController();
  const begin = performance.now();
  const seconds = () => (performance.now() - begin) / 1000;
  const tokens = [];
  let first = null;
  let usage = null;
  let finish = "";
  try {
    for await (const event of streamJson(path, body, stopping.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      first ??= seconds();
      const follow = keepEndInView();
      tokens.push(...answer.add(choice));
      finish = choice.finish_reason ?? finish;
      follow();
    }
  } catch (error) {
    if (!stopping.signal.aborted) {
      answer.element.append(make("p", { class: "error" }, error.message));
      if (first === null && answer.text === "") turns = turns.slice(0, -2); // it is not part of the conversation
    }
  }
  if (chatting() && answer.text) answer.role = "assistant";
  if (tokens.length) by("token-legend").hidden = false;
  by("stats").textContent = first === null ? "" : told(seconds(), first, usage, tokens, finish);
  by("transcript").setAttribute("aria-busy", "false");
  stopping = null;
}

async function submit(event) {
  event.preventDefault();
  const prompt = by("prompt").value;
  if (stopping || !prompt) return;
  if (!model) {
    by("stats").textContent = "The server does not say what it serves: see the line at the top.";
    return;
  }
  by("send").disabled = true;
  by("stop").disabled = false;
  by("stats").textContent = "";
  if (chatting()) by("prompt").value = "";
  try {
    await ask(prompt);
  } finally {
    by("send").disabled = false;
    by("stop").disabled = true;
  }
}

function clear() {
  stopping?.abort();
  turns = [];
  by("transcript").replaceChildren();
  by("stats").textContent = "";
  by("token-legend").hidden = true;
}

export function startTry() {
  form().addEventListener("submit", submit);
  by("stop").addEventListener("click", () => stopping?.abort());
  by("clear").addEventListener("click", clear);
  by("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form().requestSubmit();
  });
  for (const radio of form().elements.mode) {
    radio.addEventListener("change", () => {
      chosen = true;
      clear();
      showMode();
    });
  }
  watchTokens(by("transcript"));
  showMode();
}
