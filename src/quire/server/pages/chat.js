// The chat page: the list of conversations, the messages of one, and the answers that are being generated. An answer
// belongs to its conversation, whichever is shown: leaving a chat does not stop it, and nothing of it goes elsewhere.

import {
  ConversationStore, MemoryStorage, SETTINGS_FIELDS, addMessage, alternatives, branch, cleanSettings, conversationOfKey,
  defaultsOf, newConversation, nextParent, requestBody, select,
} from "./conversations.js";
import { apiKey, byId, element, isKey, request } from "./dom.js";
import { MarkdownView, hasMath, highlight } from "./markdown.js";
import { Answer, readAnswer, statsLine } from "./stream.js";

const SAVE_EVERY_MS = 1000; // of an answer that grows: what a reload would lose
const ELSEWHERE_MS = 3 * SAVE_EVERY_MS; // without news of an answer in another tab: it was interrupted
const STICKY_PX = 60; // from the end: nearer than that, the view follows the answer

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

function openStorage() {
  try {
    localStorage.setItem("quire.probe", "1");
    localStorage.removeItem("quire.probe");
    return localStorage;
  } catch {
    return new MemoryStorage(); // forbidden, or full of other things
  }
}

const store = new ConversationStore(openStorage());
const running = new Map(); // by conversation: { controller, message, conversation }
let current = newConversation(newId(), Date.now(), store.settings);
let models = []; // as the server lists them
let views = new Map(); // by message: what shows it
let leaving = false; // the page is being unloaded: its connections break
const elsewhere = new Map(); // by conversation: when another tab last stored an answer that is not finished

// ---- showing

function show(conversation, { focus = true } = {}) {
  current = running.get(conversation.id)?.conversation ?? conversation;
  byId("text").value = current.draft;
  fitText();
  notice("");
  showMessages();
  showList();
  toEnd();
  history.replaceState(null, "", "#" + current.id);
  if (focus && matchMedia("(min-width: 48.01rem)").matches) byId("text").focus();
}

function showMessages() {
  views = new Map();
  const messages = branch(current);
  byId("log").replaceChildren(...messages.map(messageElement));
  if (!messages.length) byId("log").append(element("p", { className: "welcome", text: "Ask something. The conversation stays in this browser." }));
  byId("title").textContent = current.title || "New chat";
  showModel();
  document.title = (current.title ? current.title + " · " : "") + "quire";
  const busy = running.has(current.id);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function messageElement(message) {
  const box = element("article", { className: message.role, "aria-label": message.role === "user" ? "You" : "Answer" });
  const body = element("div", { className: "body" });
  const foot = element("div", { className: "foot" });
  box.append(body, foot);
  const view = { message, box, body, foot };
  views.set(message.id, view);
  if (message.role === "user") body.textContent = message.content;
  else prepareAnswer(view);
  update(view);
  return box;
}

function prepareAnswer(view) {
  view.thoughts = element("div");
  view.details = element("details", { className: "thoughts" }, element("summary", { text: "Thoughts" }), view.thoughts);
  view.text = element("div", { className: "body" });
  view.calls = element("div");
  view.error = element("div", { className: "error", role: "alert" });
  view.markdown = new MarkdownView(view.text, { renderMath, copied: copyCode });
  view.body.classList.remove("body");
  view.body.append(view.details, view.text, view.calls, view.error);
}

function update(view) {
  const { message } = view;
  if (message.role === "assistant") updateAnswer(view);
  view.foot.replaceChildren(...footParts(message));
}

function updateAnswer(view) {
  const { message } = view;
  const isStreaming = message.state === "streaming" && running.get(current.id)?.message === message;
  view.box.setAttribute("aria-busy", String(isStreaming));
  view.details.hidden = !message.reasoning;
  view.thoughts.textContent = message.reasoning ?? "";
  if (message.json && !isStreaming) showJson(view.text, message.content);
  else view.markdown.update(message.content);
  if (hasMath(message.content) && !isStreaming) loadMath().then(() => view.markdown.refresh(message.content));
  view.text.classList.toggle("waiting", isStreaming && !message.content);
  view.calls.replaceChildren(...(message.toolCalls ?? []).map(callElement));
  view.error.hidden = !message.error;
  view.error.textContent = message.error ?? "";
}

function showJson(node, text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // cut off: shown as it is
  }
  const code = element("code");
  highlight(code, shown, "json");
  node.replaceChildren(element("div", { className: "code" }, element("pre", { tabIndex: 0 }, code)));
}

function callElement(call) {
  const code = element("code");
  highlight(code, `${call.name}(${call.arguments})`, "javascript");
  return element("div", { className: "call" }, element("strong", { text: "Tool call " }), code);
}

const footButton = (text, label, work) => element("button", { type: "button", text, "aria-label": label, title: label, onclick: work });

function footParts(message) {
  const busy = running.has(current.id);
  const parts = [];
  const others = alternatives(current, message);
  if (others.length > 1) {
    const at = others.findIndex((each) => each.id === message.id);
    const go = (place) => () => { select(current, others[place]); save(current); showMessages(); };
    parts.push(
      element("button", { type: "button", text: "‹", "aria-label": "Previous version", disabled: busy || at === 0, onclick: go(at - 1) }),
      element("span", { text: `${at + 1}/${others.length}` }),
      element("button", { type: "button", text: "›", "aria-label": "Next version", disabled: busy || at === others.length - 1, onclick: go(at + 1) }),
    );
  }
  if (message.role === "assistant" && message.stats) parts.push(element("span", { className: "stats", text: statsLine(message.stats) }));
  if (message.state === "stopped") parts.push(element("span", { text: "stopped" }));
  const isElsewhere = message.state === "streaming" && Date.now() - (elsewhere.get(current.id) ?? 0) < ELSEWHERE_MS;
  if (message.state === "streaming" && !busy) parts.push(element("span", { text: isElsewhere ? "answering in another tab" : "interrupted" }));
  if (busy || isElsewhere) return parts;
  if (message.content) parts.push(footButton("Copy", "Copy the text", (event) => copyCode(message.content, event.currentTarget)));
  if (message.role === "user") parts.push(footButton("Edit", "Edit and ask again", () => edit(message)));
  else parts.push(footButton("Retry", "Retry this answer", () => answer(current, message.parent)));
  if (message.role === "user" && current.leaf === message.id) parts.push(footButton("Retry", "Answer this", () => answer(current, message.id)));
  return parts;
}

function showFeet() {
  for (const view of views.values()) view.foot.replaceChildren(...footParts(view.message));
}

function edit(message) {
  const view = views.get(message.id);
  const text = element("textarea", { className: "edit", value: message.content, "aria-label": "Edit the message" });
  const done = element("button", { type: "button", className: "go", text: "Send" });
  const cancel = element("button", { type: "button", text: "Cancel", onclick: () => { showMessages(); byId("text").focus(); } });
  done.addEventListener("click", () => {
    if (text.value.trim()) ask(current, text.value.trim(), message.parent);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel.click();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done.click();
  });
  view.box.replaceChildren(text, element("div", { className: "row end" }, cancel, done));
  text.focus();
}

function showList() {
  const words = byId("search").value;
  byId("list").replaceChildren(...store.list(words).map(listEntry));
  const broken = store.numUnreadable;
  byId("unreadable").hidden = broken === 0;
  byId("unreadable").replaceChildren(
    `${broken} stored ${broken === 1 ? "conversation" : "conversations"} cannot be read. `,
    element("button", { type: "button", text: "Remove", onclick: () => { store.removeUnreadable(); showList(); } }),
  );
}

function listEntry(conversation) {
  const title = conversation.title || "New chat";
  const entry = element("li", { className: conversation.id === current.id ? "current" : "" });
  const open = element("button", { type: "button", text: title, onclick: () => { closeSide(); show(store.load(conversation.id) ?? conversation); } });
  if (conversation.id === current.id) open.setAttribute("aria-current", "page");
  if (running.has(conversation.id)) open.prepend(element("span", { className: "busy", text: "● ", "aria-label": "answering" }));
  entry.append(
    open,
    element("button", { type: "button", text: "✎", "aria-label": `Rename ${title}`, onclick: () => rename(conversation) }),
    element("button", { type: "button", text: "×", "aria-label": `Delete ${title}`, onclick: () => remove(conversation) }),
  );
  return entry;
}

function rename(conversation) {
  const title = prompt("Name of this conversation", conversation.title)?.trim();
  if (!title) return;
  const target = conversation.id === current.id ? current : (store.load(conversation.id) ?? conversation);
  target.title = title.slice(0, 200);
  target.renamed = Date.now();
  save(target);
  showMessages();
  showList();
}

function remove(conversation) {
  if (!confirm(`Delete “${conversation.title || "New chat"}”? This cannot be undone.`)) return;
  running.get(conversation.id)?.controller.abort();
  store.remove(conversation.id);
  if (conversation.id === current.id) startNew();
  else showList();
}

// ---- scrolling

const isAtEnd = () => byId("log").scrollHeight - byId("log").scrollTop - byId("log").clientHeight < STICKY_PX;

function toEnd() {
  byId("log").scrollTop = byId("log").scrollHeight;
  byId("to-end").hidden = true;
}

// ---- asking

function save(conversation) {
  try {
    if (!branch(conversation).length && !conversation.draft) return true;
    return store.save(conversation, running.get(conversation.id)?.message.id);
  } catch {
    notice("The browser's storage is full: this conversation is not kept. Export and delete some.");
    return true;
  }
}

function ask(conversation, text, parent) {
  const message = addMessage(conversation, { id: newId(), parent, role: "user", content: text });
  conversation.draft = "";
  answer(conversation, message.id);
}

async function answer(conversation, question) {
  if (running.has(conversation.id)) return;
  notice("");
  const body = requestBody(conversation, question, modelOf(conversation));
  if (!models.some(({ id }) => id === body.model)) delete body.model; // of another server, or not served any more
  const message = addMessage(conversation, {
    id: newId(), parent: question, role: "assistant", content: "", reasoning: "", toolCalls: [], state: "streaming", json: body.response_format !== undefined,
  });
  const run = { controller: new AbortController(), message, conversation };
  running.set(conversation.id, run);
  conversation.updated = Date.now();
  save(conversation);
  if (current === conversation) {
    showMessages();
    toEnd();
  }
  showList();
  await generate(run, body);
  running.delete(conversation.id);
  conversation.updated = Date.now();
  if (!save(conversation) && current === conversation) startNew();
  else if (current === conversation) finishView(message);
  showList();
}

/** Stream the answer of a run into its message. Never throws. */
async function generate({ controller, message, conversation }, body) {
  const grown = new Answer(() => performance.now());
  let savedMs = performance.now();
  let frame = 0;
  const copyOver = () => Object.assign(message, { content: grown.content, reasoning: grown.reasoning, toolCalls: grown.toolCalls });
  const changed = () => {
    copyOver();
    if (!frame) frame = setTimeout(() => { frame = 0; redraw(conversation, message); }, 40);
    if (performance.now() - savedMs > SAVE_EVERY_MS) {
      savedMs = performance.now();
      if (!save(conversation)) controller.abort(); // deleted in another tab
    }
  };
  try {
    byId("status").textContent = "Answering";
    const response = await request("v1/chat/completions", { body, signal: controller.signal });
    await readAnswer(response, grown, changed);
    message.state = "done";
    byId("status").textContent = "Answer finished";
  } catch (error) {
    if (leaving) return; // a reload: what is stored is shown as interrupted
    message.state = error.name === "AbortError" ? "stopped" : "error";
    if (message.state === "error") message.error = error.message;
    if (error.status === 401) askForKey("This server needs an API key.");
    byId("status").textContent = message.state === "stopped" ? "Stopped" : error.message;
  }
  clearTimeout(frame);
  copyOver();
  if (!grown.empty) message.stats = grown.stats();
}

function redraw(conversation, message) {
  const view = views.get(message.id);
  if (current !== conversation || !view) return;
  const follow = isAtEnd();
  update(view);
  if (follow) toEnd();
  else byId("to-end").hidden = false;
}

function finishView(message) {
  const follow = isAtEnd();
  const top = byId("log").scrollTop;
  const draft = views.get(message.id);
  if (draft) update(draft);
  showFeet();
  byId("send").hidden = false;
  byId("stop").hidden = true;
  if (follow) toEnd();
  else byId("log").scrollTop = top;
}

function startNew() {
  show(newConversation(newId(), Date.now(), store.settings));
  closeSide();
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

// ---- math, copying

let katex = null;
let katexLoad = null;

function loadMath() {
  katexLoad ??= import("./vendor/katex.js").then(() => { katex = globalThis.katex; }, () => {});
  return katexLoad;
}

function renderMath(source, display) {
  if (katex === null) return null;
  const node = document.createElement("span");
  try {
    katex.render(source, node, { displayMode: display, output: "mathml", throwOnError: true, trust: false, maxExpand: 200, maxSize: 20 });
    return node;
  } catch {
    return null; // shown as it was written
  }
}

async function copyCode(text, button) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } catch {
    notice("The browser did not allow copying. Select the text and copy it with the keys.");
  }
}

/** Without https or localhost a browser has no clipboard for scripts; it copies what is selected. */
function copySelected(text) {
  const focused = document.activeElement;
  const copied = element("textarea", { className: "hidden-text", value: text });
  document.body.append(copied);
  copied.select();
  const isCopied = document.execCommand("copy");
  copied.remove();
  focused?.focus();
  if (!isCopied) throw new Error("not copied");
}

// ---- settings and key

function openSettings() {
  byId("system").value = current.settings.system ?? "";
  byId("json").checked = current.settings.json === true;
  byId("chosen-model").value = modelOf(current).id;
  for (const { name } of SETTINGS_FIELDS) byId("field-" + name).value = current.settings[name] ?? "";
  showDefaults();
  byId("settings").showModal();
}

/** Empty fields show what is in force: the default of the chosen model. */
function showDefaults() {
  const defaults = defaultsOf(models.find(({ id }) => id === byId("chosen-model").value) ?? modelOf(current));
  for (const { name } of SETTINGS_FIELDS) byId("field-" + name).placeholder = name in defaults ? `default: ${defaults[name]}` : "default";
}

function settingsFields() {
  return SETTINGS_FIELDS.flatMap(({ name, label, min, max, step, hint }) => [
    element("label", { for: "field-" + name, text: label + (hint ? ` (${hint})` : "") }),
    element("input", { id: "field-" + name, type: "number", min, max, step, inputMode: "decimal", placeholder: "default" }),
  ]);
}

function closeSettings() {
  const given = { system: byId("system").value, json: byId("json").checked };
  if (models.length > 1) given.model = byId("chosen-model").value;
  for (const { name } of SETTINGS_FIELDS) {
    const text = byId("field-" + name).value;
    if (text !== "") given[name] = Number(text);
  }
  current.settings = cleanSettings(given);
  showModel();
  save(current);
  try {
    store.settings = current.settings;
  } catch {
    // storage is full: save() has said so
  }
}

function askForKey(reason) {
  byId("key-reason").textContent = reason;
  byId("key").value = apiKey.get();
  byId("remember").checked = apiKey.remembered;
  byId("key-dialog").returnValue = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

/** The model that answers a conversation: the one of its settings, if it is served here, or the first. */
function modelOf(conversation) {
  return models.find((model) => model.id === conversation.settings.model) ?? models[0] ?? { id: "", max_model_len: 0 };
}

function showModel() {
  const { id, max_model_len: context, status } = modelOf(current);
  const state = !status || status.value === "loaded" ? "" : ` · ${status.value}`;
  if (id) byId("model").textContent = `${id} · context ${context.toLocaleString("en")}${state}`;
}

async function greet() {
  const model = byId("model");
  try {
    models = (await (await request("v1/models")).json()).data;
    byId("chosen-model").replaceChildren(...models.map(({ id }) => element("option", { value: id, text: id })));
    byId("model-choice").hidden = models.length < 2;
    showModel();
    model.classList.remove("trouble");
  } catch (error) {
    model.textContent = error.status === 401 ? "API key needed" : error.message;
    model.classList.add("trouble");
    if (error.status === 401) askForKey(apiKey.get() ? "The server does not know this key." : "This server needs an API key.");
    else setTimeout(greet, 5000);
  }
}

// ---- events

function fitText() {
  const text = byId("text");
  text.rows = Math.min(10, text.value.split("\n").length + Math.floor(text.value.length / 100));
}

function closeSide() {
  byId("side").classList.remove("open");
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running.has(current.id)) return; // the draft stays until the answer is there
  byId("text").value = "";
  fitText();
  ask(current, text, nextParent(current));
});
byId("text").addEventListener("keydown", (event) => {
  if (matchMedia("(pointer: coarse)").matches) return; // a phone has no Shift+Enter: there Enter begins a line
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
byId("text").addEventListener("input", () => {
  current.draft = byId("text").value;
  fitText();
});
addEventListener("pagehide", () => {
  leaving = true;
  for (const { conversation } of running.values()) save(conversation);
  save(current);
});
addEventListener("pageshow", () => { leaving = false; });
byId("text").addEventListener("blur", () => { if (current.draft) save(current); });
function dropped(event, files) {
  const [file] = files;
  if (!file) return;
  event.preventDefault();
  if (!/^(text\/|application\/(json|xml|x-yaml))/.test(file.type || "text/plain") || file.size > 1 << 20) {
    notice(file.type.startsWith("image/") ? "The model reads text only: images are not sent." : "Only text files of at most 1 MiB can be added.");
    return;
  }
  file.text().then((text) => {
    byId("text").value += `\n\`\`\`${file.name.split(".").pop()}\n${text}\n\`\`\`\n`;
    byId("text").dispatchEvent(new Event("input"));
  });
}
byId("text").addEventListener("paste", (event) => dropped(event, event.clipboardData.files));
byId("form").addEventListener("dragover", (event) => event.preventDefault());
byId("form").addEventListener("drop", (event) => dropped(event, event.dataTransfer.files));

byId("stop").addEventListener("click", () => running.get(current.id)?.controller.abort());
byId("new").addEventListener("click", startNew);
byId("search").addEventListener("input", showList);
byId("to-end").addEventListener("click", toEnd);
byId("log").addEventListener("scroll", () => { if (isAtEnd()) byId("to-end").hidden = true; });
byId("open-side").addEventListener("click", () => byId("side").classList.add("open"));
byId("close-side").addEventListener("click", closeSide);
byId("open-settings").addEventListener("click", openSettings);
byId("chosen-model").addEventListener("change", showDefaults);
byId("settings").addEventListener("submit", closeSettings); // at once; Escape comes with close only
byId("settings").addEventListener("close", closeSettings);
byId("reset").addEventListener("click", () => {
  for (const id of ["system", ...SETTINGS_FIELDS.map(({ name }) => "field-" + name)]) byId(id).value = "";
  byId("json").checked = false;
});
byId("open-key").addEventListener("click", () => askForKey("Only needed where the server was started with keys."));
byId("cancel-key").addEventListener("click", () => byId("key-dialog").close());
byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "use") return; // Escape, Cancel: the conversations can be read without a key
  const key = byId("key").value.trim();
  if (!isKey(key)) {
    askForKey("This cannot be a key: it has characters that no key has. Copy it again.");
    return;
  }
  apiKey.set(key, byId("remember").checked);
  greet();
});
byId("export").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([store.exportText()], { type: "application/json" }));
  element("a", { href: url, download: "quire-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
});
byId("import").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async () => {
  const [file] = byId("file").files;
  byId("file").value = "";
  if (!file) return;
  try {
    const count = store.importText(await file.text());
    byId("status").textContent = `${count} ${count === 1 ? "conversation" : "conversations"} imported`;
    notice("");
    const stored = store.load(current.id);
    if (stored !== null && !running.has(current.id)) show(Object.assign(stored, { draft: current.draft }));
  } catch (error) {
    notice(error.message);
  }
  showList();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (byId("side").classList.contains("open")) closeSide();
    else running.get(current.id)?.controller.abort();
  }
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    startNew();
  }
});
addEventListener("storage", (event) => {
  // Another tab has written: its messages appear here, a deleted conversation is closed, the own answer goes on.
  const id = conversationOfKey(event.key);
  if (event.key !== null && id === null) return;
  if (id === current.id && !running.has(id)) {
    const stored = store.load(id);
    if (stored === null) startNew();
    else {
      const { draft } = current;
      current = Object.assign(stored, { draft });
      if (stored.messages[stored.leaf]?.state === "streaming") {
        elsewhere.set(id, Date.now());
        setTimeout(showFeet, ELSEWHERE_MS);
      } else elsewhere.delete(id);
      if (!byId("log").querySelector("textarea.edit")) showMessages(); // else when the edit ends
    }
  }
  showList();
});

addEventListener("hashchange", () => {
  const linked = store.load(location.hash.slice(1));
  if (linked !== null && linked.id !== current.id) show(linked);
});

byId("fields").append(...settingsFields());
show(store.load(location.hash.slice(1)) ?? current);
greet();
