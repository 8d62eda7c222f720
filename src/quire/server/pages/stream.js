// Streams of server-sent events: how they are read, and those of a chat completion as text, reasoning, tool calls, counts and times.

/** Splits a stream of server-sent events, however it was cut, into the data of each event. */
export class EventParser {
  #rest = "";
  #data = [];

  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines.map((each) => (each.endsWith("\r") ? each.slice(0, -1) : each))) {
      if (line.startsWith("data:")) this.#data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
      else if (line === "" && this.#data.length) {
        events.push(this.#data.join("\n"));
        this.#data = [];
      }
    }
    return events;
  }
}

/** One answer as it grows. `now` gives milliseconds. */
export class Answer {
  constructor(now) {
    this.now = now;
    this.startedMs = now();
    this.firstMs = null;
    this.lastMs = null;
    this.content = "";
    this.reasoning = "";
    this.toolCalls = [];
    this.finishReason = null;
    this.usage = null;
    this.numChunks = 0;
  }

  /** Take one chunk; throws the server's own words where the stream broke. */
  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? "The answer broke off.");
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    if (!delta.content && !reasoning && !delta.tool_calls) return;
    this.lastMs = this.now();
    this.firstMs ??= this.lastMs;
    this.numChunks += 1;
    this.content += delta.content ?? "";
    this.reasoning += reasoning;
    for (const call of delta.tool_calls ?? []) this.#addCall(call);
  }

  #addCall(call) {
    const known = (this.toolCalls[call.index ?? 0] ??= { name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }

  get empty() {
    return !this.content && !this.reasoning && !this.toolCalls.length;
  }

  /** Times and counts, for the line below an answer. */
  stats() {
    const numTokens = this.usage?.completion_tokens ?? this.numChunks;
    const seconds = this.firstMs === null ? 0 : (this.lastMs - this.firstMs) / 1000;
    return {
      firstTokenMs: this.firstMs === null ? null : Math.round(this.firstMs - this.startedMs),
      tokensPerSecond: numTokens > 1 && seconds > 0 ? (numTokens - 1) / seconds : null,
      numTokens,
      numPromptTokens: this.usage?.prompt_tokens ?? null,
      numCachedTokens: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      finishReason: this.finishReason,
    };
  }
}

/** The line below an answer. */
export function statsLine(stats) {
  const parts = [];
  if (stats.tokensPerSecond) parts.push(`${stats.tokensPerSecond.toFixed(stats.tokensPerSecond < 10 ? 1 : 0)} tok/s`);
  if (stats.firstTokenMs !== null) parts.push(`first token ${stats.firstTokenMs < 1000 ? stats.firstTokenMs + " ms" : (stats.firstTokenMs / 1000).toFixed(1) + " s"}`);
  parts.push(`${stats.numTokens} ${stats.numTokens === 1 ? "token" : "tokens"}`);
  if (stats.numPromptTokens !== null) {
    const cached = stats.numCachedTokens ? `, ${stats.numCachedTokens} cached` : "";
    parts.push(`prompt ${stats.numPromptTokens}${cached}`);
  }
  if (stats.finishReason === "length") parts.push("ended at the token limit");
  return parts.join(" · ");
}

/** Read a streamed response to its end: `take` gets the data of each event, `heard` is called after every piece of the body. Throws
 * `broken` if the connection breaks. */
export async function readEvents(response, broken, take, heard) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw error.name === "AbortError" ? error : broken; });
    if (done) return;
    parser.push(value).forEach(take);
    heard();
  }
}

/** Read a streamed response into an answer; `changed` is called after every piece of the body. */
export async function readAnswer(response, answer, changed) {
  let finished = false;
  const broken = new Error("The connection ended before the answer did.");
  await readEvents(response, broken, (data) => {
    if (data === "[DONE]") finished = true;
    else answer.add(JSON.parse(data));
  }, changed);
  if (!finished) throw broken;
}
