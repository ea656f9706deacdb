// Requests to the server that this page came from.

import { readEvents } from "./sse.js";

const STORED = "latentserve-api-key";

export function storedKey() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // a browser may forbid it
  }
}

export function storeKey(key) {
  try {
    if (key) sessionStorage.setItem(STORED, key);
    else sessionStorage.removeItem(STORED);
  } catch {
    // The field still holds it, for as long as the page is open.
  }
}

let current = () => "";

export function keyFrom(read) {
  // `read` gives the key of now.
  current = read;
}

function headers() {
  const key = current();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function problem(response) {
  let message = `HTTP status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not in the envelope: the status has to do.
  }
  return Object.assign(new Error(message), { status: response.status });
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(10_000) });
  if (!response.ok) throw await problem(response);
  return response.json();
}

async function* chunksOf(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function* streamJson(path, body, signal) {
  // The events of an answer that is streamed. Throws what the server says where it refuses.
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await problem(response);
  yield* readEvents(chunksOf(response.body));
}
