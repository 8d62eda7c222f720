// Conversations, kept in the browser. A conversation is a tree of messages: an edited question or a second answer is a
// branch, and `leaf` is the end of the branch that is shown. Each conversation has its own key in the storage, so tabs
// that write different ones do not meet; tabs that write the same one merge their messages.

const PREFIX = "quire.chat.";
const SETTINGS = "quire.settings";
const ROLES = ["user", "assistant"];
const STATES = ["done", "streaming", "stopped", "error"];

/** Sampling settings: the ranges that the server accepts and that make sense. Empty: the model's default. */
export const SETTINGS_FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0: always the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: 0, max: 1000, step: 1, hint: "0: all tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05 },
  { name: "max_tokens", label: "Longest answer, in tokens", min: 1, max: 1000000, step: 1 },
  { name: "seed", label: "Seed", min: 0, max: 2147483647, step: 1 },
];

/** For a model whose files name no temperature: else a small one samples from all its tokens, and soon writes nonsense. */
const WITHOUT_DEFAULTS = { temperature: 0.7, top_p: 0.95 };

/** What is in force where the user set nothing: what the model's files say, and for a model that says nothing ours. */
export function defaultsOf(model) {
  const own = model.default_sampling_params;
  return own && own.temperature === undefined ? { ...WITHOUT_DEFAULTS, ...own } : own ?? {};
}

/** A settings object with only what is valid. */
export function cleanSettings(given) {
  const clean = {};
  if (typeof given !== "object" || given === null) return clean;
  for (const { name, min, max, step } of SETTINGS_FIELDS) {
    const value = given[name];
    if (typeof value !== "number" || !Number.isFinite(value)) continue;
    const bounded = Math.min(max, Math.max(min, value));
    clean[name] = step === 1 ? Math.round(bounded) : bounded;
  }
  if (typeof given.system === "string" && given.system.trim()) clean.system = given.system;
  if (given.json === true) clean.json = true;
  if (typeof given.model === "string" && given.model && given.model.length <= 200) clean.model = given.model;
  return clean;
}

export function newConversation(id, now, settings) {
  return { id, title: "", created: now, updated: now, settings: { ...settings }, messages: {}, leaf: null, draft: "" };
}

/** A new message below `parent`; it becomes the end of the branch that is shown. */
export function addMessage(conversation, message) {
  conversation.messages[message.id] = { state: "done", ...message };
  conversation.leaf = message.id;
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.content);
  return conversation.messages[message.id];
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line;
}

/** The messages from the first to `leaf`. */
export function branch(conversation, leaf = conversation.leaf) {
  const found = [];
  const seen = new Set();
  for (let id = leaf; id && conversation.messages[id] && !seen.has(id); id = conversation.messages[id].parent) {
    seen.add(id);
    found.push(conversation.messages[id]);
  }
  return found.reverse();
}

/** The alternatives of a message, itself among them, in the order they were made. */
export function alternatives(conversation, message) {
  return Object.values(conversation.messages).filter((each) => each.parent === message.parent && each.role === message.role);
}

/** Show the branch of an alternative: to its newest end. */
export function select(conversation, message) {
  let id = message.id;
  const seen = new Set();
  for (;;) {
    seen.add(id);
    const below = Object.values(conversation.messages).filter((each) => each.parent === id && !seen.has(each.id));
    if (!below.length) break;
    id = below[below.length - 1].id;
  }
  conversation.leaf = id;
}

/** Where the next question goes: a question that got no answer is not sent again with each that follows. */
export function nextParent(conversation) {
  let leaf = conversation.messages[conversation.leaf];
  if (leaf?.role === "assistant" && !leaf.content && !leaf.toolCalls?.length) leaf = conversation.messages[leaf.parent];
  if (leaf?.role === "user") return leaf.parent ?? null;
  return leaf?.id ?? null;
}

/** The body of the request that answers the question `leaf`. What the model's own files say is not sent. */
export function requestBody(conversation, leaf, model = {}) {
  const own = model.default_sampling_params ?? {};
  const ours = Object.fromEntries(Object.entries(defaultsOf(model)).filter(([name]) => own[name] === undefined));
  const { system, json, ...sampling } = cleanSettings(conversation.settings);
  const messages = branch(conversation, leaf)
    .filter((message) => message.content)
    .map(({ role, content }) => ({ role, content }));
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    ...ours,
    ...sampling,
    ...(json ? { response_format: { type: "json_object" } } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** A stored or imported conversation, or null where it is none. Unknown fields are dropped. */
export function readConversation(value) {
  if (typeof value !== "object" || value === null || typeof value.id !== "string" || !/^[\w-]{1,64}$/.test(value.id)) return null;
  if (typeof value.messages !== "object" || value.messages === null || Array.isArray(value.messages)) return null;
  const number = (each) => (Number.isFinite(each) ? each : 0);
  const text = (each) => (typeof each === "string" ? each : "");
  const conversation = newConversation(value.id, number(value.created), cleanSettings(value.settings));
  conversation.updated = number(value.updated);
  conversation.title = text(value.title).slice(0, 200);
  conversation.renamed = number(value.renamed);
  conversation.draft = text(value.draft);
  for (const [id, message] of Object.entries(value.messages)) {
    if (typeof message !== "object" || message === null || !ROLES.includes(message.role) || message.id !== id) return null;
    conversation.messages[id] = {
      id,
      parent: typeof message.parent === "string" && Object.hasOwn(value.messages, message.parent) ? message.parent : null,
      role: message.role,
      content: text(message.content),
      reasoning: text(message.reasoning),
      state: STATES.includes(message.state) ? message.state : "done",
      error: text(message.error),
      json: message.json === true,
      stats: readStats(message.stats),
      toolCalls: Array.isArray(message.toolCalls)
        ? message.toolCalls.map((call) => ({ name: text(call?.name), arguments: text(call?.arguments) }))
        : [],
    };
  }
  const ids = Object.keys(conversation.messages);
  conversation.leaf = ids.includes(value.leaf) ? value.leaf : (ids[ids.length - 1] ?? null);
  return conversation;
}

function readStats(given) {
  if (typeof given !== "object" || given === null) return null;
  const number = (each) => (Number.isFinite(each) ? each : null);
  return {
    firstTokenMs: number(given.firstTokenMs),
    tokensPerSecond: number(given.tokensPerSecond),
    numTokens: number(given.numTokens) ?? 0,
    numPromptTokens: number(given.numPromptTokens),
    numCachedTokens: number(given.numCachedTokens),
    finishReason: typeof given.finishReason === "string" ? given.finishReason : null,
  };
}

/** The conversations of this browser. `storage` is localStorage, or anything with its methods. */
export class ConversationStore {
  #saved = new Set(); // ids that this tab has seen in the storage: if one is gone, another tab deleted it

  constructor(storage) {
    this.storage = storage;
  }

  #keys() {
    return Array.from({ length: this.storage.length }, (_, i) => this.storage.key(i)).filter((key) => key.startsWith(PREFIX));
  }

  #parse(key) {
    try {
      return readConversation(JSON.parse(this.storage.getItem(key)));
    } catch {
      return null;
    }
  }

  /** The newest first; with `words`, those whose title or text has all of them. */
  list(words = "") {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.#keys().map((key) => this.#parse(key)).filter((each) => each !== null);
    const matching = found.filter((each) => {
      if (!wanted.length) return true;
      const text = [each.title, ...Object.values(each.messages).map((message) => message.content)].join("\n").toLowerCase();
      return wanted.every((word) => text.includes(word));
    });
    return matching.sort((a, b) => b.updated - a.updated);
  }

  /** How many stored values cannot be read. They are left alone until `removeUnreadable`. */
  get numUnreadable() {
    return this.#keys().filter((key) => this.#parse(key) === null).length;
  }

  removeUnreadable() {
    for (const key of this.#keys()) if (this.#parse(key) === null) this.storage.removeItem(key);
  }

  load(id) {
    const found = this.#parse(PREFIX + id);
    if (found !== null) this.#saved.add(id);
    return found;
  }

  /** Write a conversation, with what other tabs have added to it: messages, and the growth of all answers but `own`, which
   * this tab receives. False: another tab deleted it. */
  save(conversation, own = null) {
    const stored = this.#parse(PREFIX + conversation.id);
    if (stored === null && this.#saved.has(conversation.id)) return false;
    for (const [id, message] of Object.entries(stored?.messages ?? {})) {
      const known = conversation.messages[id];
      if (!known || (known.state === "streaming" && id !== own)) conversation.messages[id] = message;
    }
    if (stored !== null && (stored.renamed ?? 0) > (conversation.renamed ?? 0)) {
      conversation.title = stored.title;
      conversation.renamed = stored.renamed;
    }
    this.storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    this.#saved.add(conversation.id);
    return true;
  }

  remove(id) {
    this.storage.removeItem(PREFIX + id);
  }

  exportText() {
    return JSON.stringify({ format: "quire-conversations", version: 1, conversations: this.list() }, null, 1);
  }

  /** Add the conversations of an exported file; the number of them. Those that are here already get its messages. */
  importText(text) {
    let value;
    try {
      value = JSON.parse(text);
    } catch {
      throw new Error("This file is not JSON; choose one that Export has written.");
    }
    const read = Array.isArray(value?.conversations) ? value.conversations.map(readConversation) : [];
    const found = read.filter((each) => each !== null);
    if (!found.length) throw new Error("This file has no conversations; choose one that Export has written.");
    found.forEach((conversation, number) => {
      this.#saved.delete(conversation.id);
      try {
        this.save(conversation);
      } catch {
        throw new Error(`The browser's storage is full: ${number} of ${found.length} conversations were imported. Delete some and import again.`);
      }
    });
    return found.length;
  }

  /** The settings that a new conversation starts with. */
  get settings() {
    try {
      return cleanSettings(JSON.parse(this.storage.getItem(SETTINGS)));
    } catch {
      return {};
    }
  }

  set settings(settings) {
    this.storage.setItem(SETTINGS, JSON.stringify(cleanSettings(settings)));
  }
}

/** The id of the conversation that a storage key holds, or null. */
export const conversationOfKey = (key) => (key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null);

/** A storage of this page only, where the browser allows no other. */
export class MemoryStorage {
  #values = new Map();

  get length() {
    return this.#values.size;
  }

  key(i) {
    return [...this.#values.keys()][i] ?? null;
  }

  getItem(key) {
    return this.#values.get(key) ?? null;
  }

  setItem(key, value) {
    this.#values.set(key, String(value));
  }

  removeItem(key) {
    this.#values.delete(key);
  }
}
