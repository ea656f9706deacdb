// Server-sent events, as they come in pieces that end anywhere.

export class EventParser {
  // Takes text, gives the data of every event that is complete.
  #line = "";
  #data = [];
  #afterReturn = false;

  push(text) {
    const events = [];
    for (const character of text) {
      if (character === "\n" && this.#afterReturn) {
        this.#afterReturn = false;
        continue;
      }
      this.#afterReturn = character === "\r";
      if (character !== "\n" && character !== "\r") {
        this.#line += character;
        continue;
      }
      if (this.#line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (this.#line.startsWith("data:")) {
        this.#data.push(this.#line.slice(this.#line[5] === " " ? 6 : 5));
      }
      this.#line = "";
    }
    return events;
  }
}

export async function* readEvents(chunks) {
  // The JSON values of a stream of byte arrays, up to [DONE]. Throws what an error event says, and where the stream
  // ends before [DONE].
  const parser = new EventParser();
  const decoder = new TextDecoder();
  for await (const bytes of chunks) {
    for (const data of parser.push(decoder.decode(bytes, { stream: true }))) {
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new Error(value.error.message);
      yield value;
    }
  }
  throw new Error("The connection broke off before the answer ended.");
}
