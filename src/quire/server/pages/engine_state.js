// The state behind the live view: recent steps, figures of them, percentiles from the metrics page; when a stream that broke is
// opened again. Draws nothing.

export const MAX_STEPS = 400; // kept and drawn

/** The rows that a text of digits marks with 1. */
export function rowsOf(digits) {
  const rows = [];
  for (let row = digits.indexOf("1"); row >= 0; row = digits.indexOf("1", row + 1)) rows.push(row);
  return rows;
}

/** The recent steps of the engine. `add` takes what the server sent since the last time, with decodes as a digit for each row. */
export class Timeline {
  steps = [];

  get last() {
    return this.steps.length ? this.steps[this.steps.length - 1].step : -1;
  }

  add(steps) {
    for (const step of steps) {
      if (step.step <= this.last) this.steps = []; // another engine has started
      this.steps.push({ ...step, decodes: rowsOf(step.decodes) });
    }
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
  }

  /** Tokens per second and the usual step time over the last `seconds`. */
  speed(nowS, seconds = 5) {
    const recent = this.steps.filter((step) => step.end_s > nowS - seconds);
    if (!recent.length) return { decodePerS: 0, prefillPerS: 0, stepMs: null };
    const decoded = recent.reduce((sum, step) => sum + step.decodes.length, 0);
    const prefilled = recent.reduce((sum, step) => sum + step.prefills.reduce((part, [, tokens]) => part + tokens, 0), 0);
    const times = recent.map((step) => step.seconds * 1000).sort((a, b) => a - b);
    const span = Math.max(nowS - recent[0].end_s + recent[0].seconds, 1e-3);
    return { decodePerS: decoded / span, prefillPerS: prefilled / span, stepMs: times[Math.floor(times.length / 2)] };
  }
}

/** The state after an event of the stream: the first one has all fields, later ones those that have changed. Its steps go to the timeline,
 * in the place of those that are there if they are of another engine, or of a replay that went back. */
export function stateAfter(before, { since, steps, ...changed }, timeline) {
  const isOther = before !== null && "engine" in changed && changed.engine !== before.engine;
  if (isOther || since < timeline.last) timeline.steps = [];
  timeline.add(steps);
  return { ...before, ...changed };
}

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 15000;

/** The time until a stream is opened again that broke so often in a row: doubled each time, and not less than the server said. Up to a
 * third is added by chance, so that many pages do not come back together. */
export function retryMs(numFailures, retryAfterS, chance) {
  const usual = Math.min(FIRST_RETRY_MS * 2 ** (numFailures - 1), LONGEST_RETRY_MS);
  return Math.max(usual, retryAfterS * 1000) * (1 + chance / 3);
}

/** The buckets of a histogram on a Prometheus page: [[upper bound, count], …], cumulative. */
export function buckets(page, name) {
  const found = new Map();
  for (const line of page.split("\n")) {
    if (!line.startsWith(`quire_${name}_bucket{`)) continue;
    const bound = /le="([^"]+)"/.exec(line)?.[1];
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    const upper = bound === "+Inf" ? Infinity : Number(bound);
    found.set(upper, (found.get(upper) ?? 0) + value);
  }
  return [...found].sort(([a], [b]) => a - b);
}

/** A quantile in seconds of what came between two readings; null if nothing did. */
export function quantile(before, after, share) {
  const earlier = new Map(before);
  const counts = after.map(([bound, count]) => [bound, Math.max(count - (earlier.get(bound) ?? 0), 0)]);
  const total = counts.length ? counts[counts.length - 1][1] : 0;
  if (!total) return null;
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (share * total - below)) / Math.max(count - below, 1e-9);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

/** Rows as runs of neighbours, [first, count]: one rectangle each. */
export function runs(rows) {
  const found = [];
  let end = -1;
  for (const row of [...rows].sort((a, b) => a - b)) {
    if (found.length && row === end) found[found.length - 1][1] += 1;
    else found.push([row, 1]);
    end = row + 1;
  }
  return found;
}

/** A hue for each request: neighbours differ. */
export const hue = (number) => Math.round((number * 137.508) % 360);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return seconds < 120 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`;
}

/** How a map of `count` cells fills a rectangle: columns, rows, and the side of a cell. */
export function grid(count, width, height) {
  if (!count) return { columns: 1, rows: 1, side: 1 };
  const side = Math.max(Math.floor(Math.sqrt((width * height) / count)), 1);
  let columns = Math.max(Math.floor(width / side), 1);
  let size = side;
  while (size > 1 && Math.ceil(count / columns) * size > height) {
    size -= 1;
    columns = Math.max(Math.floor(width / size), 1);
  }
  return { columns, rows: Math.ceil(count / columns), side: size };
}

/**
 * The prefix tree as an icicle: a rectangle for each node, [parent, blocks, hits, on host]. Below its parent, as wide as its share of
 * the blocks; hits of the nodes below count for those above them, which they passed through.
 */
export function icicle(nodes) {
  const placed = nodes.map(([parent, blocks, hits, host]) => ({ parent, blocks, hits, host, weight: 0, level: 0, x: 0, width: 0, used: 0 }));
  for (let i = placed.length - 1; i >= 0; i--) {
    const node = placed[i];
    node.weight = Math.max(node.weight, node.blocks);
    if (node.parent < 0) continue;
    placed[node.parent].weight += node.weight;
    placed[node.parent].hits += node.hits;
  }
  const root = { x: 0, width: 1, level: -1, used: 0, weight: placed.reduce((sum, node) => sum + (node.parent < 0 ? node.weight : 0), 0) };
  for (const node of placed) {
    const above = node.parent < 0 ? root : placed[node.parent];
    node.level = above.level + 1;
    node.x = above.x + above.used;
    node.width = (above.width * node.weight) / Math.max(above.weight, 1);
    above.used += node.width;
  }
  return placed;
}
