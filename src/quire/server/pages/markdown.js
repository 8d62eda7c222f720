// Markdown to elements. marked only splits the text into tokens; the elements are made here, one by one, and text is
// set as text. HTML in the source is shown as text, links go to web and mail addresses only, and no image is loaded.

import { Marked } from "./vendor/marked.js";
import highlighter from "./vendor/highlight.js";

const MAX_HIGHLIGHTED = 20_000; // characters of a code block: longer ones stay plain
const MAX_DEPTH = 40; // of nested quotes and lists: deeper ones are shown as they were written
const MAX_CHARACTERS = 400_000; // longer texts are shown as they were written
const LINK = /^(?:https?:\/\/|mailto:)/i;

const BLOCK_MATH = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/;
// As in pandoc: no space inside the dollars, no digit after them, so that prices stay prices.
const INLINE_MATH = /^(?:\$\$([^\n]+?)\$\$|\\\(([\s\S]+?)\\\)|\$(?=[^\s$])([^$`\n]*?[^\s\\$`])\$(?!\d))/;

const mathRule = (name, level, start, rule) => ({
  name,
  level,
  start: (text) => text.match(start)?.index,
  tokenizer(text) {
    const found = rule.exec(text);
    if (found) return { type: name, raw: found[0], text: (found[1] ?? found[2] ?? found[3]).trim(), display: level === "block" || found[1] !== undefined };
  },
});

const parser = new Marked({
  gfm: true,
  extensions: [
    mathRule("blockMath", "block", /\$\$|\\\[/, BLOCK_MATH),
    mathRule("inlineMath", "inline", /\$|\\\(/, INLINE_MATH),
  ],
});

const make = (tag, className) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return node;
};
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–", times: "×", rarr: "→", larr: "←" };
const textOf = (token) => document.createTextNode(decoded(token.text ?? token.raw ?? ""));

/** Character references, as text: an element is never made of them. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w+));/g, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

/** A renderer of one message. `update` keeps the elements of blocks that have not changed: a long answer grows at its end. */
export class MarkdownView {
  #blocks = []; // [raw, element] of each block shown

  /** `root` is filled; `renderMath(source, display)` gives an element, or null where there is none yet. */
  constructor(root, { renderMath = () => null, copied = () => {} } = {}) {
    this.root = root;
    this.context = { renderMath, copied, depth: 0 };
  }

  update(text) {
    const tokens = tokensOf(text).filter((token) => token.type !== "space" && token.type !== "def");
    let kept = 0;
    while (kept < tokens.length && kept < this.#blocks.length && this.#blocks[kept][0] === tokens[kept].raw) kept += 1;
    for (const [, node] of this.#blocks.splice(kept)) node.remove();
    for (const token of tokens.slice(kept)) {
      const node = block(token, this.context);
      this.root.append(node);
      this.#blocks.push([token.raw, node]);
    }
  }

  /** Make all elements again, for what could not be rendered before. */
  refresh(text) {
    for (const [, node] of this.#blocks.splice(0)) node.remove();
    this.update(text);
  }
}

function tokensOf(text) {
  const plain = [{ type: "plain", raw: text, text }];
  if (text.length > MAX_CHARACTERS) return plain;
  try {
    return parser.lexer(text);
  } catch {
    return plain; // nested too deep for the parser
  }
}

export const hasMath = (text) => /\$|\\\(|\\\[/.test(text);

function block(token, context) {
  if (context.depth > MAX_DEPTH) return plain(token.raw);
  const inner = { ...context, depth: context.depth + 1 };
  switch (token.type) {
    case "heading":
      return filled(make("h" + Math.min(6, token.depth + 2)), token.tokens, inner); // the page's own are above
    case "paragraph":
      return filled(make("p"), token.tokens, inner);
    case "text":
      return filled(make("span"), token.tokens ?? [{ type: "raw", raw: token.text }], inner);
    case "blockquote":
      return withBlocks(directed(make("blockquote")), token.tokens, inner);
    case "list":
      return list(token, inner);
    case "code":
      return codeBlock(token, inner);
    case "table":
      return table(token, inner);
    case "hr":
      return make("hr");
    case "blockMath":
      return math(token, context, make("div", "math"));
    case "plain":
      return plain(token.text);
    default:
      return plain(token.raw); // html, too
  }
}

function plain(text) {
  const node = make("p", "plain");
  node.textContent = text;
  return node;
}

/** Bullets, bars and columns begin where the first text within does: at the right for Hebrew and Arabic. */
function directed(node) {
  node.dir = "auto";
  return node;
}

function withBlocks(node, tokens, context) {
  for (const token of tokens) if (token.type !== "space") node.append(block(token, context));
  return node;
}

function list(token, context) {
  const node = directed(make(token.ordered ? "ol" : "ul"));
  if (token.ordered && Number.isInteger(token.start)) node.start = token.start;
  for (const item of token.items) {
    const entry = make("li");
    if (item.task) {
      const box = make("input");
      Object.assign(box, { type: "checkbox", checked: item.checked, disabled: true });
      box.setAttribute("aria-label", item.checked ? "done" : "open");
      entry.append(box);
    }
    node.append(withBlocks(entry, item.tokens.filter((each) => each.type !== "checkbox"), context));
  }
  return node;
}

function table(token, context) {
  const node = directed(make("table"));
  const row = (cells, tag) => {
    const line = make("tr");
    cells.forEach((cell) => {
      const entry = filled(make(tag), cell.tokens, context);
      if (cell.align) entry.className = "align-" + cell.align;
      line.append(entry);
    });
    return line;
  };
  const head = make("thead");
  head.append(row(token.header, "th"));
  const body = make("tbody");
  body.append(...token.rows.map((cells) => row(cells, "td")));
  node.append(head, body);
  const scroller = make("div", "scroll");
  scroller.append(node);
  return scroller;
}

function codeBlock(token, context) {
  const language = (token.lang ?? "").trim().split(/\s+/)[0];
  const box = make("div", "code");
  const head = make("div", "code-head");
  const name = make("span");
  name.textContent = language;
  const copy = make("button");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", () => context.copied(token.text, copy));
  head.append(name, copy);
  const body = make("pre");
  const code = make("code");
  body.tabIndex = 0; // long lines are scrolled with the keys, too
  body.append(code);
  box.append(head, body);
  highlight(code, token.text, language);
  return box;
}

/** Code as spans with the classes of highlight.js. */
export function highlight(code, text, language) {
  const known = text.length <= MAX_HIGHLIGHTED && language && highlighter.getLanguage(language);
  if (!known) {
    code.textContent = text;
    return;
  }
  // The emitter is the tree behind highlight.js' HTML: with it no HTML is parsed.
  const { rootNode } = highlighter.highlight(text, { language, ignoreIllegals: true })._emitter;
  const grow = (node, children) => {
    for (const child of children) {
      if (typeof child === "string") node.append(document.createTextNode(child));
      else node.append(grow(make("span", child.scope ? "hl-" + child.scope.split(".")[0].replace(/[^\w-]/g, "") : ""), child.children));
    }
    return node;
  };
  grow(code, rootNode.children);
}

function math(token, context, node) {
  const rendered = context.renderMath(token.text, token.display);
  if (rendered) node.append(rendered);
  else node.append(document.createTextNode(token.raw.trim()));
  return node;
}

function filled(node, tokens, context) {
  for (const token of tokens ?? []) node.append(inline(token, context));
  return node;
}

const INLINE_TAGS = { strong: "strong", em: "em", del: "del" };

function inline(token, context) {
  if (context.depth > MAX_DEPTH) return document.createTextNode(token.raw);
  const inner = { ...context, depth: context.depth + 1 };
  if (INLINE_TAGS[token.type]) return filled(make(INLINE_TAGS[token.type]), token.tokens, inner);
  switch (token.type) {
    case "codespan": {
      const node = make("code");
      node.textContent = token.text;
      return node;
    }
    case "br":
      return make("br");
    case "link":
      return link(token, inner);
    case "image": // would be loaded from elsewhere: its address is shown instead
      return link({ href: token.href, tokens: [{ type: "raw", raw: `image: ${token.text || token.href}` }] }, inner);
    case "inlineMath":
      return math(token, context, make("span", "math"));
    case "text":
      return token.tokens ? filled(make("span"), token.tokens, inner) : textOf(token);
    case "escape":
      return textOf(token);
    default:
      return document.createTextNode(token.raw); // html, too
  }
}

function link(token, context) {
  const href = String(token.href ?? "");
  if (!LINK.test(href)) return filled(make("span"), token.tokens, context);
  const node = filled(make("a"), token.tokens, context);
  node.setAttribute("href", href);
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("target", "_blank");
  return node;
}
