// The live view: reads the server's stream of what changes while the page is visible, and draws it. A replay is shown the same way.

import { apiKey, byId, element, request, ServerError } from "./dom.js";
import { Timeline, buckets, duration, grid, hue, icicle, quantile, retryMs, runs, stateAfter } from "./engine_state.js";
import { bindReplay, showReplay } from "./replay.js";
import { readEvents } from "./stream.js";

const SILENT_MS = 45000; // a stream that says nothing for so long is lost: the server sends a comment every 15 s
const METRICS_MS = 2000; // between two questions
const LATENCIES = { TTFT: "time_to_first_token_seconds", ITL: "inter_token_latency_seconds" };

const timeline = new Timeline();
let paused = false;
let latest = null;
let stream = null; // the AbortController of the one that is open
let numFailures = 0; // in a row
let retry = null; // the timer of the next attempt
let earlierPage = null;
const latencies = {};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

/** A context of a canvas in device pixels, cleared. */
function surface(id) {
  const canvas = byId(id);
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function drawMap(view) {
  const { context, width, height } = surface("map");
  const { columns, side } = grid(view.states.length, width, height);
  const requestOf = new Map(view.rows.map((row) => [row.row, row.request]));
  const [free, cached, held, shared] = ["free", "cached", "held", "shared"].map(colour);
  const gap = side > 3 ? 1 : 0;
  for (let i = 0; i < view.states.length; i++) {
    const state = view.states[i];
    const owner = requestOf.get(view.owners[i]);
    if (state === "0") context.fillStyle = free;
    else if (state === "1") context.fillStyle = cached;
    else if (state === "4") context.fillStyle = shared;
    else context.fillStyle = owner === undefined ? held : `hsl(${hue(owner)} 55% 52%)`;
    context.fillRect((i % columns) * side, Math.floor(i / columns) * side, side - gap, side - gap);
  }
  const used = view.num_blocks - view.num_free - view.num_evictable;
  const tokens = (blocks) => (blocks * view.block_size).toLocaleString("en");
  byId("map-text").textContent = `${used.toLocaleString("en")} of ${view.num_blocks.toLocaleString("en")} blocks held (${tokens(used)} of ${tokens(view.num_blocks)} tokens), `
    + `${view.num_cached.toLocaleString("en")} in the prefix cache, ${view.num_evictable.toLocaleString("en")} of them evictable`
    + (view.num_host ? `, ${view.num_host.toLocaleString("en")} on the host` : "") + ".";
}

let treeNodes = []; // as drawn
let chosen = null; // the place of the node that is described: its level, and a point within its width

function drawTree(view) {
  const { context, width, height } = surface("tree");
  treeNodes = icicle(view.tree);
  const levels = Math.max(4, ...treeNodes.map((node) => node.level + 1));
  const most = Math.max(1, ...treeNodes.map((node) => node.hits));
  const [cold, hot, free, held] = ["cached", "shared", "free", "held"].map(colour);
  for (const node of treeNodes) {
    const box = [node.x * width, (node.level * height) / levels, Math.max(node.width * width - 1, 0.5), height / levels - 1];
    context.globalAlpha = 1;
    context.fillStyle = node.host ? free : cold;
    context.fillRect(...box);
    context.globalAlpha = node.hits ? 0.25 + (0.75 * Math.log(1 + node.hits)) / Math.log(1 + most) : 0;
    context.fillStyle = hot;
    context.fillRect(...box);
    context.globalAlpha = 1;
    if (node.host) {
      context.strokeStyle = held;
      context.strokeRect(box[0] + 0.5, box[1] + 0.5, Math.max(box[2] - 1, 0), Math.max(box[3] - 1, 0));
    }
  }
  const node = nodeAt(chosen);
  if (node) {
    context.strokeStyle = colour("text");
    context.lineWidth = 2;
    context.strokeRect(node.x * width + 1, (node.level * height) / levels + 1, Math.max(node.width * width - 3, 1), height / levels - 3);
    byId("node-text").textContent = describeNode(node);
  }
  const tops = treeNodes.filter((node) => node.parent < 0);
  const hits = tops.reduce((sum, node) => sum + node.hits, 0);
  const part = view.num_nodes > treeNodes.length ? `, the ${treeNodes.length} most used drawn` : "";
  byId("tree-text").textContent = treeNodes.length
    ? `${view.num_nodes === 1 ? "1 node" : view.num_nodes.toLocaleString("en") + " nodes"}${part}; roots on top, as wide as their blocks; ${hits === 1 ? "1 hit" : hits.toLocaleString("en") + " hits"}, `
      + `${Math.max(...tops.map((node) => node.hits)).toLocaleString("en")} of them below one root.`
    : "Nothing is cached yet.";
}

const nodeAt = (place) => place && treeNodes.find((node) => node.level === place.level && node.x <= place.x && place.x < node.x + node.width);

function describeNode(node) {
  const counted = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  return `Level ${node.level + 1}: ${counted(node.blocks, "block")} (${counted(node.blocks * latest.block_size, "token")})${node.host ? " on the host" : ""}, ${counted(node.hits, "hit")}.`;
}

function choosePlace(place) {
  if (!nodeAt(place)) return;
  chosen = place;
  drawTree(latest);
}

function choosePointed(event) {
  const box = byId("tree").getBoundingClientRect();
  const levels = Math.max(4, ...treeNodes.map((node) => node.level + 1));
  choosePlace({ level: Math.floor(((event.clientY - box.top) / box.height) * levels), x: (event.clientX - box.left) / box.width });
}

/** The nodes beside, above and below the chosen one. */
function chooseByKey(event) {
  const node = nodeAt(chosen);
  const beside = (level) => treeNodes.filter((each) => each.level === level).sort((a, b) => a.x - b.x);
  const next = {
    ArrowRight: () => beside(node.level).find((each) => each.x > node.x),
    ArrowLeft: () => beside(node.level).findLast((each) => each.x < node.x),
    ArrowUp: () => nodeAt({ level: node.level - 1, x: node.x }),
    ArrowDown: () => beside(node.level + 1).find((each) => each.x >= node.x && each.x < node.x + node.width),
  }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const found = node ? next() : beside(0)[0];
  if (found) choosePlace({ level: found.level, x: found.x + found.width / 2 });
}

function drawTimeline(view) {
  const { context, width, height } = surface("timeline");
  const steps = timeline.steps;
  const rowsOf = (step) => [...step.decodes, ...step.prefills.map(([row]) => row)];
  const highest = steps.reduce((most, step) => Math.max(most, ...rowsOf(step)), 8) + 1;
  const [stepWidth, rowHeight] = [Math.max(width / 400, 2), height / highest];
  const [decode, prefill, bad] = [colour("decode"), colour("prefill"), colour("bad")];
  const shown = steps.slice(-Math.floor(width / stepWidth));
  const left = width - shown.length * stepWidth; // the newest step is on the right from the first on
  const gap = rowHeight > 3 ? 0.5 : 0; // thin rows are drawn as one rectangle: a hundred thousand take a processor
  const fillRows = (rows, x) => {
    for (const [row, count] of gap ? rows.map((each) => [each, 1]) : runs(rows)) {
      context.fillRect(x, row * rowHeight, stepWidth, Math.max(count * rowHeight - gap, 0.5));
    }
  };
  shown.forEach((step, i) => {
    const x = left + i * stepWidth;
    if (step.num_preemptions) {
      context.fillStyle = bad;
      context.fillRect(x, 0, stepWidth, 3);
    }
    context.fillStyle = decode;
    fillRows(step.decodes, x);
    context.fillStyle = prefill;
    fillRows(step.prefills.filter(([, tokens]) => tokens).map(([row]) => row), x);
  });
  byId("time-text").textContent = steps.length
    ? `Steps ${steps[0].step} to ${timeline.last}, the newest on the right; ${view.rows.length} of ${view.max_rows} rows in use.`
    : view.replay ? "No step yet." : "No step since this page was opened. Ask something in the chat.";
}

function drawSpeed(view) {
  const { context, width, height } = surface("speed");
  const steps = timeline.steps;
  const target = view.itl_target_s;
  byId("speed-target").hidden = !target;
  if (!steps.length) return;
  const slowest = Math.max(...steps.map((step) => step.seconds), 1e-3);
  const top = target && target < 2 * slowest ? Math.max(slowest, 1.05 * target) : slowest; // of the picture
  const most = Math.max(...steps.map((step) => step.decodes.length), 1);
  const stepWidth = width / Math.max(steps.length, 50);
  context.fillStyle = colour("cached");
  steps.forEach((step, i) => context.fillRect(i * stepWidth, height * (1 - step.seconds / top), Math.max(stepWidth - 0.5, 1), height));
  context.strokeStyle = colour("decode");
  context.lineWidth = 1.5;
  context.beginPath();
  steps.forEach((step, i) => context.lineTo((i + 0.5) * stepWidth, height * (1 - (0.95 * step.decodes.length) / most)));
  context.stroke();
  if (target && target <= top) {
    context.strokeStyle = colour("bad");
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(0, height * (1 - target / top));
    context.lineTo(width, height * (1 - target / top));
    context.stroke();
    context.setLineDash([]);
  }
  const slow = target ? `, ${steps.filter((step) => step.seconds > target).length} above their target of ${duration(target)}` : "";
  byId("speed-text").textContent = `${steps.length} steps, the slowest ${duration(slowest)}${slow}; up to ${most} decoding ${most === 1 ? "row" : "rows"}.`;
}

function showFigures(view) {
  const speed = timeline.speed(view.now_s);
  const used = view.num_blocks - view.num_free - view.num_evictable;
  const figures = {
    "running": view.rows.length,
    "waiting": view.num_waiting + (view.waiting_for && view.num_waiting ? ` (for ${view.waiting_for})` : ""),
    "KV cache held": `${((100 * used) / Math.max(view.num_blocks, 1)).toFixed(0)} %`,
    "decoded": `${speed.decodePerS.toFixed(0)} tok/s`,
    "prompts": `${speed.prefillPerS.toFixed(0)} tok/s`,
    "step, median": duration(speed.stepMs === null ? null : speed.stepMs / 1000),
    ...Object.fromEntries(Object.entries(latencies).map(([name, text]) => [name, text])),
  };
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, value]) =>
    element("div", {}, element("dt", { text: name }), element("dd", { text: String(value) }))));
}

const cells = (...values) => element("tr", {}, ...values.map((value) => element("td", {}, value instanceof Node ? value : String(value))));

function showTables(view) {
  byId("queue-empty").hidden = view.queue.length > 0;
  byId("queue").replaceChildren(...view.queue.map((each) => cells(each.priority, each.tenant || "–", each.num_requests)));
  byId("rows").replaceChildren(...view.rows.slice(0, 200).map((row) => cells(
    element("button", { type: "button", text: row.request, "aria-label": `Explain request ${row.request}`, onclick: () => explain(row.request) }),
    row.row,
    row.decoding ? "decoding" : `prompt ${row.num_computed}/${row.num_prompt}`,
    row.num_prompt,
    row.num_cached,
    row.num_preemptions,
    duration(view.now_s - row.arrived_s),
  )));
}

/** The parameter that names the chosen model, where there are several. */
function ofModel(mark) {
  const name = byId("models").value;
  return name ? `${mark}model=${encodeURIComponent(name)}` : "";
}

async function explain(number) {
  byId("story-title").textContent = `Request ${number}`;
  try {
    const body = await (await request(`engine/requests/${number}/explain${ofModel("?")}`)).json();
    byId("story-text").textContent = body.lines.join("\n");
  } catch (error) {
    byId("story-text").textContent = error.message;
  }
  byId("story").showModal();
}

function draw() {
  if (latest === null) return;
  drawMap(latest);
  drawTree(latest);
  drawTimeline(latest);
  drawSpeed(latest);
  showFigures(latest);
  if (!document.activeElement?.closest("#rows")) showTables(latest);
}

function notice(text, needsKey = false) {
  byId("notice").hidden = !text;
  byId("notice").textContent = text;
  byId("key-form").hidden = !needsKey;
}

function take(data) {
  const event = JSON.parse(data);
  if (event.error) throw new ServerError(event.error.message, { code: event.error.code });
  latest = stateAfter(latest, event, timeline);
  numFailures = 0;
  showReplay(latest.replay);
  notice(latest.replay?.notice ?? "");
  draw();
  if (!latest.replay) begin();
}

/** Read the stream until it breaks or is closed: one at a time, and none while the page is hidden. */
async function follow() {
  clearTimeout(retry);
  if (stream !== null || paused || document.hidden) return;
  const own = (stream = new AbortController());
  const lost = new ServerError("The connection to the server was lost. The page tries again until it is back.");
  let silence = null;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => own.abort(), SILENT_MS);
  };
  try {
    heard();
    const response = await request(`engine/events?since=${timeline.last}${ofModel("&")}`, { signal: own.signal });
    await readEvents(response, lost, (data) => { if (stream === own) take(data); }, heard);
    throw lost;
  } catch (error) {
    if (stream !== own) return; // the page closed it
    fail(error.name === "AbortError" || error.code === "unreachable" ? lost : error);
  } finally {
    clearTimeout(silence);
    own.abort();
  }
}

/** Say what is wrong, and open the stream again later; where a key is missing, when it is there. */
function fail(error) {
  stream = null;
  numFailures += 1;
  notice(error.message, error.status === 401);
  if (error.status === 401) return; // the form opens it
  if (error.code === "model_unavailable") begin();
  retry = setTimeout(follow, retryMs(numFailures, error.retryAfter ?? 0, Math.random()));
}

function close() {
  clearTimeout(retry);
  const own = stream;
  stream = null; // first: `follow` sees that this is no failure
  own?.abort();
}

function reopen() {
  close();
  follow();
}

let measuring = false;
async function readMetrics() {
  measuring = true;
  if (stream !== null && !numFailures) {
    try {
      const page = await (await request("metrics")).text();
      for (const [name, metric] of Object.entries(LATENCIES)) {
        const now = buckets(page, metric);
        const [p50, p99] = [0.5, 0.99].map((share) => quantile(earlierPage === null ? [] : buckets(earlierPage, metric), now, share));
        if (p50 !== null) latencies[`${name} p50, p99`] = `${duration(p50)}, ${duration(p99)}`;
      }
      earlierPage = page;
    } catch {
      // the stream tells what is wrong
    }
  }
  setTimeout(readMetrics, METRICS_MS);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").textContent = paused ? "Continue" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(paused));
  reopen();
});
document.addEventListener("visibilitychange", reopen);
byId("tree").addEventListener("pointermove", choosePointed);
byId("tree").addEventListener("keydown", chooseByKey);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(byId("key").value.trim(), false);
  notice("");
  reopen();
});
addEventListener("resize", draw);
byId("models").addEventListener("change", () => {
  timeline.steps = [];
  reopen();
});
function listModels({ data }) {
  byId("models").hidden = data.length < 2 || !data[0].status;
  byId("model").textContent = byId("models").hidden ? data[0].id : "";
  if (byId("models").hidden) return;
  byId("models").append(new Option("the one used last", ""), ...data.filter(({ id, root }) => id === root).map(({ id }) => new Option(id, id)));
}

let listing = false;
/** The list of models of a live engine, also where one is to be chosen first. Asked for again after a failure. */
function begin() {
  if (listing) return;
  listing = true;
  request("v1/models").then((response) => response.json()).then(listModels, () => { listing = false; });
  if (!measuring) readMetrics();
}

bindReplay(notice);
follow();
