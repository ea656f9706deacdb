// Tokens of an event: their text, how likely they were, and whether they were drafts that were accepted.

export function tokensOf(choice) {
  // Of a choice of /v1/chat/completions or /v1/completions: [{text, logprob, top: [{text, logprob}], drafted}].
  const logprobs = choice.logprobs;
  const drafts = choice.accepted_drafts ?? [];
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((entry, place) => ({
      text: entry.token,
      logprob: entry.logprob,
      top: entry.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
      drafted: drafts[place] === true,
    }));
  }
  return logprobs.tokens.map((text, place) => ({
    text,
    logprob: logprobs.token_logprobs[place],
    top: Object.entries(logprobs.top_logprobs[place] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
    drafted: drafts[place] === true,
  }));
}

export function align(text, tokens) {
  // Which part of an event's text each token made: [{text, tokens}]. A token with no text of its own, such as the end
  // of the sequence, goes with the part before it. Where the tokens do not spell the text, as when several share a
  // character or some are held back, they stand for it together.
  const parts = [];
  let place = 0;
  for (const token of tokens) {
    if (token.text !== "" && text.startsWith(token.text, place)) {
      parts.push({ text: token.text, tokens: [token] });
      place += token.text.length;
    } else if (place === text.length && parts.length) {
      parts.at(-1).tokens.push(token);
    } else {
      return text ? [{ text, tokens }] : [];
    }
  }
  if (place < text.length) return [{ text, tokens }];
  return parts;
}

export function percent(logprob) {
  // A probability as people read it.
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 10 ? `${share.toFixed(0)} %` : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

export function visible(text) {
  // A token's text with what cannot be seen spelled out.
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(no text)";
}
