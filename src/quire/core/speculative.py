"""The setting `speculative`: where the drafts of speculative decoding come from.

    off                    nowhere
    grammar                only what a grammar forces, which is drafted with every other value, too
    ngram, tree            the text of the request; earlier requests with the same prefix
    auto                   the same as ngram+tree, without the tree where prefix caching is off
    draft:MODEL            a draft model: a path, a short name or a hub id
    eagle:PATH             an EAGLE-3 head: a folder, or a hub id
    mtp                    the multi-token-prediction layer in the model's own files
    ngram+draft:MODEL      the text where it has a draft, else the model; also tree+, ngram+tree+ and auto+, and
                           with eagle:PATH and mtp

Does not depend on models.
"""

from typing import NamedTuple

from quire.core.errors import ConfigError

SPECULATIVE = ("off", "grammar", "ngram", "tree", "ngram+tree", "auto", "mtp")
# Where a draft may come from, by place. `text`: ngram or tree, on a device that does not say which.
DRAFTERS = ("grammar", "tree", "ngram", "text", "draft", "eagle", "mtp", "unknown")
MODEL_DRAFTERS = ("draft", "eagle", "mtp")  # those that compute what they draft, in passes
_PREFIXES = {"draft": "draft:", "eagle": "eagle:"}
_OWN_LAYERS = "mtp"
_BESIDE_MODEL = ("ngram", "tree", "ngram+tree", "auto")
SPECULATIVE_VALUES = (
    f"one of {', '.join(SPECULATIVE)}, or draft:MODEL or eagle:PATH, the last three also behind ngram+, tree+ or auto+"
)


class DraftSources(NamedTuple):
    """A value of the setting in its parts."""

    beside: str  # all but the draft model; empty: it is alone
    model: str | None  # the name of a draft model, or of an EAGLE head; empty: layers of the model itself
    kind: str = ""  # what the model is: "draft", "eagle" or "mtp"


def parse_sources(value: str) -> DraftSources:
    """Split a value. The model is the rest behind `draft:` or `eagle:`, and may contain any character."""
    found = [(value.find(prefix), kind) for kind, prefix in _PREFIXES.items() if prefix in value]
    if not found:
        beside, plus, last = value.rpartition("+")
        is_own = last == _OWN_LAYERS and bool(beside) == bool(plus)
        return DraftSources(beside, "", _OWN_LAYERS) if is_own else DraftSources(value, None)
    start, kind = min(found)
    beside, model = value[:start], value[start + len(_PREFIXES[kind]) :]
    if beside and not beside.endswith("+"):
        return DraftSources(value, None)
    return DraftSources(beside.removesuffix("+"), model, kind)


def is_speculative(value: object) -> bool:
    """Whether this is a value of the setting."""
    if not isinstance(value, str):
        return False
    beside, model, kind = parse_sources(value)
    if model is None or value in SPECULATIVE:
        return value in SPECULATIVE
    return bool(model.strip() or kind == _OWN_LAYERS) and (not beside or beside in _BESIDE_MODEL)


def resolve_drafters(value: str, *, caches_prefixes: bool) -> tuple[str, ...]:
    """The drafters by name; none: speculative decoding is off."""
    beside, model, kind = parse_sources(value)
    if beside == "off":
        return ()
    names = ("ngram", "tree") if beside == "auto" else tuple(name for name in beside.split("+") if name)
    if "tree" in names and not caches_prefixes and beside != "auto":
        without = "+".join(
            [*(name for name in names if name != "tree"), *([f"{_PREFIXES.get(kind, kind)}{model}"] if kind else [])]
        )
        raise ConfigError(
            f"speculative is {value}, which drafts from the prefix cache, and prefix caching is off. Use "
            f"--speculative {without or 'ngram'}, or omit --no-enable-prefix-caching and --regime.",
            param="speculative",
        )
    return (*(name for name in names if name != "tree" or caches_prefixes), *((kind,) if kind else ()))
