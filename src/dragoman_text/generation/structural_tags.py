"""Structural tags of vLLM and xgrammar, converted to Lark: free text in which some parts follow a schema or grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.documents import parse_json
from dragoman_text.generation.gbnf import literal, to_lark
from dragoman_text.generation.json_schema import json_grammar

_ANY_TEXT = r"/(.|\n)*/"
_REPETITIONS = {"optional": "?", "plus": "+", "star": "*"}
_KINDS = (
    "const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags, tags_with_separator, "
    "optional, plus, star, repeat"
)


def to_grammars(text: str, *, compact: bool = False) -> str:
    """Return structural tags as llguidance's list of grammars; `compact`: JSON has one form. Raises ValueError if they
    are invalid.

    Both forms are accepted: `structures` with `triggers`, and xgrammar's `format`.
    """
    value = parse_json(text)
    writer = _Writer(compact=compact)
    match value:
        case {"format": Mapping() as form}:
            start = writer.write(form, is_last=True)
        case {"structures": [*structures], "triggers": [*triggers]}:
            tags = [_tag_of_structure(each) for each in structures]
            start = writer.write({"type": "triggered_tags", "triggers": triggers, "tags": tags}, is_last=True)
        case _:
            raise ValueError('structural tags: expected "format", or "structures" and "triggers"')
    lark = "\n".join([f"start: {start}", *writer.rules])
    return json.dumps({"grammars": [{"name": "structural_tags", "lark_grammar": lark}, *writer.grammars]})


def _tag_of_structure(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, dict):
        raise ValueError('structural tags: expected structures with "begin", "schema" and "end"')
    content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
    return {"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")}


class _Writer:
    """rules: lines of Lark. grammars: further grammars, to which the rules refer by name."""

    def __init__(self, *, compact: bool) -> None:
        self._compact = compact
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []

    def write(self, form: Any, *, is_last: bool, end: str = "") -> str:
        """Return the symbols of a format, followed by a literal. is_last: the text ends after it."""
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "any_text":
            if end:
                return self._rule(f"{_ANY_TEXT} {literal(end)}", "[lazy]")
            _require(is_last, "any_text: expected it at the end, or as the content of a tag with an end")
            return _ANY_TEXT
        if kind == "triggered_tags":
            _require(is_last and not end, "triggered_tags: expected them at the end")
            return self._triggered_tags(form)
        symbols = self._symbols(str(kind), form, is_last=is_last and not end)
        return f"{symbols} {literal(end)}" if end else symbols

    def _symbols(self, kind: str, form: Mapping[str, Any], *, is_last: bool) -> str:
        match kind:
            case "const_string":
                return literal(_text(form, "value"))
            case "json_schema":
                kind, text = json_grammar(json.dumps(form.get("json_schema")), compact=self._compact)
                return f"%json {text}" if kind == "json_schema" else self._add_grammar({"lark_grammar": text})
            case "regex":
                return self._add_grammar({"lark_grammar": f"start: /{_regex(_text(form, 'pattern'))}/"})
            case "grammar":
                return self._add_grammar({"lark_grammar": to_lark(_text(form, "grammar"))})
            case "sequence":
                *before, last = _list(form, "elements")
                return " ".join(
                    [*(self.write(each, is_last=False) for each in before), self.write(last, is_last=is_last)]
                )
            case "or":
                return self._choice([self.write(each, is_last=is_last) for each in _list(form, "elements")])
            case "tag":
                return self._tag(form, "", is_last=is_last)
            case "tags_with_separator":
                return self._separated_tags(form)
            case "optional" | "plus" | "star" | "repeat":
                return f"({self.write(form.get('content'), is_last=False)}){_repetition(kind, form)}"
        raise ValueError(f"structural tags: expected a format of type {_KINDS}, got {kind!r}")

    def _tag(self, tag: Any, trigger: str, *, is_last: bool) -> str:
        """Return the symbols of a tag after its trigger."""
        _require(isinstance(tag, dict), "expected a tag as an object")
        begin, end = _text(tag, "begin").removeprefix(trigger), tag.get("end", "")
        _require(isinstance(end, str), 'tag: expected text as "end"')
        return f"{literal(begin)} {self.write(tag.get('content'), is_last=is_last, end=end)}"

    def _triggered_tags(self, form: Mapping[str, Any]) -> str:
        """Return free text in which each trigger begins one of the tags."""
        triggers, tags = _list(form, "triggers"), _list(form, "tags")
        _require(all(isinstance(each, str) and each for each in triggers), "triggers: expected non-empty strings")
        by_trigger: dict[str, list[Any]] = {}
        for tag in tags:
            begin = _text(tag if isinstance(tag, dict) else {}, "begin")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            _require(trigger is not None, f"tag: expected a begin with one of the triggers, got {begin[:40]!r}")
            by_trigger.setdefault(str(trigger), []).append(tag)
        options = []
        for trigger, group in by_trigger.items():
            opening = self._rule(f"{_ANY_TEXT} {literal(trigger)}", "[lazy]")
            options.append(f"{opening} {self._choice([self._tag(tag, trigger, is_last=False) for tag in group])}")
        some = self._choice(options)
        first = self._choice([self._tag(tag, "", is_last=False) for tag in tags])
        if form.get("stop_after_first"):
            return first if form.get("at_least_one") else f"({some} | {_ANY_TEXT})"
        return f"{f'{first} ' if form.get('at_least_one') else ''}{some}* {_ANY_TEXT}"

    def _separated_tags(self, form: Mapping[str, Any]) -> str:
        one = self._choice([self._tag(tag, "", is_last=False) for tag in _list(form, "tags")])
        separator = form.get("separator", "")
        _require(isinstance(separator, str), "tags_with_separator: expected text as separator")
        several = one if form.get("stop_after_first") else f"{one} ({literal(separator)} {one})*"
        return several if form.get("at_least_one") else f"({several})?"

    def _choice(self, options: Sequence[str]) -> str:
        return self._rule(" | ".join(options))

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _add_grammar(self, grammar: dict[str, str]) -> str:
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, **grammar})
        return f"@{name}"


def _repetition(kind: str, form: Mapping[str, Any]) -> str:
    if kind != "repeat":
        return _REPETITIONS[kind]
    least, most = (_count(form, name) for name in ("min", "max"))
    return f"{{{least},{'' if most < 0 else most}}}"


def _require(holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"structural tags: {expected}")


def _text(form: Mapping[str, Any], name: str) -> str:
    value = form.get(name)
    _require(isinstance(value, str) and bool(value), f'expected text as "{name}", got {value!r:.40}')
    return str(value)


def _list(form: Mapping[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    _require(isinstance(value, list) and bool(value), f'expected a list as "{name}" that is not empty')
    return list(value or ())


def _count(form: Mapping[str, Any], name: str) -> int:
    value = form.get(name)
    _require(isinstance(value, int) and not isinstance(value, bool) and value >= -1, f'expected an integer as "{name}"')
    return int(value or 0)


def _regex(pattern: str) -> str:
    """Return a pattern for a Lark regular expression, which ends at a slash or a line break."""
    escaped, parts = False, []
    for character in pattern:
        parts.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(parts)
