// The endpoints of this server, from its OpenAPI document: fields, an example as a curl command, and a form to send it.

import { apiKey, byId, element, request } from "./dom.js";

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.type === "array") return "[" + (schema.items ? typeOf(schema.items) : "any") + "]";
  return schema.type ?? "any";
}

function fields(schema) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).filter(([, field]) => !field.deprecated).map(([name, field]) => element(
    "tr", {},
    element("td", {}, element("code", { text: name }), required.includes(name) ? " (required)" : ""),
    element("td", {}, element("code", { text: typeOf(field) })),
  ));
  return element("details", {}, element("summary", { text: `${rows.length} fields` }), element("div", { className: "scroll" }, element("table", {}, element("tbody", {}, ...rows))));
}

const address = (path) => new URL(path.replace(/^\//, ""), document.baseURI).href;

/** The command that sends a body, for a POSIX shell. */
function curl(method, url, body, keyed) {
  const parts = ["curl", url];
  if (method !== "GET" && body === null) parts.push("-X", method);
  if (keyed) parts.push("-H", '"Authorization: Bearer $QUIRE_API_KEY"');
  if (body !== null) parts.push("-H", "'Content-Type: application/json'", "-d", `'${body.replaceAll("'", "'\\''")}'`);
  return parts.join(" ");
}

function example(method, path, examples) {
  const names = Object.keys(examples);
  const text = element("textarea", { "aria-label": "Body", spellcheck: false, hidden: !names.length });
  const command = element("pre", { tabIndex: 0 });
  const shown = () => {
    let compact = names.length ? text.value : null;
    try {
      compact = compact && JSON.stringify(JSON.parse(compact));
    } catch {
      // shown as it is: the server says what is wrong with it
    }
    command.textContent = curl(method, address(path), compact, apiKey.get() !== "");
  };
  const fill = (name) => {
    text.value = name === undefined ? "" : JSON.stringify(examples[name].value, null, 2);
    text.rows = Math.min(20, text.value.split("\n").length + 1);
    shown();
  };
  text.addEventListener("input", shown);
  fill(names[0]);
  const choices = names.length > 1 ? names.map((name) => element("button", { type: "button", text: name, onclick: () => fill(name) })) : [];
  const response = element("pre", { className: "response", hidden: true, tabIndex: 0, "aria-label": "Response" });
  const send = element("button", { type: "button", className: "go", text: "Send", onclick: () => run(method, path, names.length ? text.value : null, response) });
  return [element("h3", { text: "Example" }), element("div", { className: "row wrap" }, ...choices), command, text, element("div", { className: "row" }, send), response];
}

async function run(method, path, body, shown) {
  shown.hidden = false;
  shown.textContent = "…";
  const started = performance.now();
  try {
    const key = apiKey.get();
    const headers = { ...(body === null ? {} : { "content-type": "application/json" }), ...(key ? { authorization: "Bearer " + key } : {}) };
    const response = await fetch(address(path), { method, headers, body: body ?? undefined });
    const text = await response.text();
    let shownBody = text;
    try {
      shownBody = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // a stream, or text
    }
    shown.textContent = `${response.status} · ${Math.round(performance.now() - started)} ms\n${shownBody.slice(0, 100_000)}`;
  } catch {
    shown.textContent = "The server cannot be reached.";
  }
}

function endpoint(path, method, operation, spec) {
  const content = operation.requestBody?.content["application/json"];
  const box = element("details", { id: `${method}${path}` }, element("summary", {}, element("b", { text: method.toUpperCase() }), element("code", { text: path }), " " + operation.summary));
  box.addEventListener("toggle", () => {
    if (box.childElementCount > 1) return;
    if (content) box.append(fields(spec.components.schemas[typeOf(content.schema)]));
    if (!path.includes("{")) box.append(...example(method.toUpperCase(), path, content?.examples ?? {}));
  });
  return box;
}

async function main() {
  byId("notice").hidden = true;
  try {
    const spec = await (await request("openapi.json")).json();
    byId("list").replaceChildren(...Object.entries(spec.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => endpoint(path, method, operation, spec))));
  } catch (error) {
    byId("notice").hidden = false;
    byId("notice").textContent = error.message;
  }
}

byId("key").value = apiKey.get();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(byId("key").value.trim(), false);
  main();
});
main();
