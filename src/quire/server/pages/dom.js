// Elements, and requests to this server. Text is always set as text: nothing here parses HTML.

/** An element with properties, attributes (aria-…, data-…, and others with a dash) and children. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else if (name.includes("-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

const KEY = "quire.key";

/** Whether a text can be sent as a key: a browser refuses headers with other characters. */
export const isKey = (text) => /^[\x21-\x7e]*$/.test(text);

/** The API key: in this tab, or on this device where the user asked for it. Storage may be forbidden. */
export const apiKey = {
  get() {
    try {
      const key = sessionStorage.getItem(KEY) || localStorage.getItem(KEY) || "";
      return isKey(key) ? key : "";
    } catch {
      return this.unstored ?? "";
    }
  },
  get remembered() {
    try {
      return localStorage.getItem(KEY) !== null;
    } catch {
      return false;
    }
  },
  set(key, remember) {
    this.unstored = key;
    try {
      sessionStorage.setItem(KEY, key);
      if (remember && key) localStorage.setItem(KEY, key);
      else localStorage.removeItem(KEY);
    } catch {
      // kept for this page only
    }
  },
};

export class ServerError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = 0 } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** The response of this server, or a `ServerError` with a sentence for people. The path is relative: a proxy may serve
 * the page below a path. */
export async function request(path, { body, signal, method } = {}) {
  const key = apiKey.get();
  const headers = { ...(body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: "Bearer " + key } : {}) };
  let response;
  try {
    response = await fetch(path, { method: method ?? (body ? "POST" : "GET"), headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running? Your text is kept; try again.", { code: "unreachable" });
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON: a proxy's page, perhaps
  }
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  const facts = { status: response.status, code: error.code ?? "", retryAfter };
  return new ServerError(sentence(response.status, facts.code, error.message, retryAfter), facts);
}

function sentence(status, code, message, retryAfter) {
  const wait = retryAfter ? ` Try again in ${retryAfter} s.` : "";
  if (status === 401) return "This server needs an API key.";
  if (code === "context_length_exceeded") return message + " Edit the message, or start a new chat.";
  if (status === 429 || status === 503) return (message ?? "The server is busy.") + wait;
  return message ?? `The server answered with status ${status}.`;
}
