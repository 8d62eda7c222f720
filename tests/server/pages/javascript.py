"""Runs the scripts of the pages in QuickJS, without a browser: modules, and as much of a document as they use."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import quickjs

from quire.server.static_files import FOLDER

# What QuickJS lacks of the language, and a document that only builds a tree.
_PRELUDE = """
for (const kind of [Array, String]) kind.prototype.at ??= function (i) { return this[i < 0 ? this.length + i : i]; };
String.prototype.replaceAll ??= function (from, to) { return this.split(from).join(to); };
Object.hasOwn ??= (object, name) => Object.prototype.hasOwnProperty.call(object, name);
globalThis.self = globalThis;
globalThis.modules = {};
class TextNode {
  constructor(text) { this.text = String(text); }
  get textContent() { return this.text; }
  tree() { return this.text; }
}
class ElementNode {
  constructor(tag) { this.tag = tag; this.nodes = []; this.attributes = {}; this.listeners = {}; }
  append(...nodes) {
    for (const node of nodes) {
      const child = typeof node === "string" ? new TextNode(node) : node;
      child.parent = this;
      this.nodes.push(child);
    }
  }
  remove() { this.parent.nodes = this.parent.nodes.filter((node) => node !== this); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, work) { this.listeners[name] = work; }
  get textContent() { return this.nodes.map((node) => node.textContent).join(""); }
  set textContent(text) { this.nodes = []; this.append(new TextNode(text)); }
  set innerHTML(text) { throw new Error("innerHTML was set"); }
  set outerHTML(text) { throw new Error("outerHTML was set"); }
  insertAdjacentHTML() { throw new Error("insertAdjacentHTML was called"); }
  tree() {
    const shown = { ...this.attributes };
    for (const name of ["className", "start", "type", "checked"]) if (this[name] !== undefined && this[name] !== "") shown[name] = this[name];
    return [this.tag, shown, ...this.nodes.map((node) => node.tree())];
  }
}
globalThis.document = { createElement: (tag) => new ElementNode(tag), createTextNode: (text) => new TextNode(text) };
"""
_IMPORT = re.compile(r'^import (.+?) from "\./(.+?)";$', re.MULTILINE | re.DOTALL)
_EXPORTED = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)
_EXPORT_LIST = re.compile(r"export\s*\{([^}]*)\};?\s*$")


@cache
def _as_script(name: str) -> tuple[str, tuple[str, ...]]:
    """A module as a function that registers its exports, and the modules that it imports."""
    source = (FOLDER / name).read_text(encoding="utf-8")
    names = {exported: exported for exported in _EXPORTED.findall(source)}
    if found := _EXPORT_LIST.search(source):
        pairs = (entry.split(" as ") for entry in found[1].split(","))
        names |= {pair[-1].strip(): pair[0].strip() for pair in pairs}
        source = source[: found.start()]
    needed = tuple(match[2] for match in _IMPORT.finditer(source))
    base = Path(name).parent

    def imported(match: re.Match[str]) -> str:
        what = match[1] if match[1].startswith("{") else f"{{ default: {match[1]} }}"
        return f"const {what.replace(' as ', ': ')} = modules[{json.dumps((base / match[2]).as_posix())}];"

    source = re.sub(r"^export ", "", _IMPORT.sub(imported, source), flags=re.MULTILINE)
    exports = ", ".join(f"{json.dumps(outer)}: {inner}" for outer, inner in names.items())
    script = f"modules[{json.dumps(name)}] = (() => {{ {source}\nreturn {{ {exports} }}; }})();"
    return script, tuple((base / each).as_posix() for each in needed)


class Page:
    """A context with some modules loaded; the exports of all of them are global."""

    def __init__(self, *names: str) -> None:
        self._context = quickjs.Context()
        self._context.eval(_PRELUDE)
        self._loaded: set[str] = set()
        for name in names:
            self._load(name)
            self._context.eval(f"Object.assign(globalThis, modules[{json.dumps(name)}])")

    def _load(self, name: str) -> None:
        if name in self._loaded:
            return
        self._loaded.add(name)
        script, needed = _as_script(name)
        for each in needed:
            self._load(each)
        self._context.eval(script)

    def run(self, script: str, **given: Any) -> Any:
        """The value of an expression, in which the given names have their values."""
        for name, value in given.items():
            self._context.eval(f"globalThis.{name} = JSON.parse({json.dumps(json.dumps(value))})")
        return json.loads(self._context.eval(f"JSON.stringify([({script})])"))[0]  # in a list, undefined is null

    def do(self, script: str) -> None:
        self._context.eval(script)
