// What was said, token by token, and what is known of a token under the pointer or the keyboard's focus.

import { by, make } from "./dom.js";
import { align, percent, tokensOf, visible } from "./tokens.js";

const known = new WeakMap();

export class Turn {
  // One part of the conversation. `element` is in the document.
  constructor(who) {
    this.who = who;
    this.text = "";
    this.reasoning = null;
    this.said = make("div", { class: "said" });
    this.element = make("div", { class: "turn" }, make("h3", {}, who), this.said);
  }

  write(text) {
    this.text += text;
    this.said.append(text);
  }

  add(choice) {
    // New text of a streamed choice, with its tokens where they come along.
    const delta = choice.delta ?? { content: choice.text };
    const content = delta.content ?? "";
    const reasoning = delta.reasoning_content ?? "";
    const tokens = tokensOf(choice);
    // The tokens of an event that has both cannot be told apart.
    if (reasoning) put(this.#thoughts(), reasoning, content ? [] : tokens);
    if (content) put(this.said, content, reasoning ? [] : tokens);
    this.text += content;
    return tokens;
  }

  #thoughts() {
    if (!this.reasoning) {
      this.reasoning = make("div", { class: "said reasoning" });
      this.said.before(this.reasoning);
    }
    return this.reasoning;
  }
}

function put(where, text, tokens) {
  if (!tokens.length) {
    where.append(text);
    return;
  }
  for (const part of align(text, tokens)) {
    const drafted = part.tokens.some((token) => token.drafted);
    const span = make("span", { class: drafted ? "token drafted" : "token", tabindex: "-1" }, part.text);
    known.set(span, part.tokens);
    where.append(span);
  }
}

function tipOf(tokens) {
  return tokens.flatMap((token) => [
    make("div", {}, `${visible(token.text)} ${percent(token.logprob)}${token.drafted ? ", an accepted draft" : ""}`),
    make("table", {}, make("tbody", {}, ...token.top.map((other) =>
      make("tr", {}, make("td", {}, percent(other.logprob)), make("td", {}, visible(other.text)))))),
  ]);
}

function show(span) {
  const tip = by("tip");
  tip.replaceChildren(...tipOf(known.get(span)));
  tip.hidden = false;
  const at = span.getBoundingClientRect();
  const left = Math.max(4, Math.min(at.left, innerWidth - tip.offsetWidth - 4));
  const below = at.bottom + 6 + tip.offsetHeight <= innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - tip.offsetHeight - 6)}px`;
  span.setAttribute("aria-describedby", "tip");
}

function hide() {
  by("tip").hidden = true;
  for (const span of document.querySelectorAll("[aria-describedby='tip']")) span.removeAttribute("aria-describedby");
}

export function watchTokens(transcript) {
  // Show what is known of tokens in `transcript`: on hover, on a tap, and along the arrow keys.
  const token = (event) => {
    const span = event.target.closest?.(".token");
    return span && known.has(span) ? span : null;
  };
  for (const name of ["pointerover", "focusin", "click"]) {
    transcript.addEventListener(name, (event) => {
      hide();
      if (token(event)) show(token(event));
    });
  }
  for (const name of ["pointerleave", "focusout", "scroll"]) transcript.addEventListener(name, hide);
  transcript.addEventListener("keydown", (event) => {
    const spans = [...transcript.querySelectorAll(".token")];
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (event.key === "Escape") {
      hide();
      transcript.focus();
    } else if (event.key in moves && spans.length) {
      event.preventDefault();
      const place = spans.indexOf(document.activeElement);
      const next = place < 0 ? (moves[event.key] > 0 ? 0 : spans.length - 1) : place + moves[event.key];
      spans[Math.max(0, Math.min(next, spans.length - 1))].focus();
    }
  });
}
