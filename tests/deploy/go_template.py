"""The part of Helm's templates that our chart uses: a renderer for tests, because `helm` is not in the registries.

`test_chart.py` compares it with Helm where Helm's library is installed.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"(?:(?P<trim>\s*)\{\{-|\{\{)(?P<code>(?:[^}\"]|\"[^\"]*\")*?)(?:-\}\}\s*|\}\})", re.S)
_WORD = re.compile(r'"[^"]*"|[|()]|[^\s|()]+')


class ChartError(Exception):
    """The chart rejects its values by `fail`."""


def render_chart(chart: Path, values: dict[str, Any], release: str = "test") -> list[dict[str, Any]]:
    """Return the objects of a chart's templates. Raises ChartError, and KeyError for an unknown value or function."""
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    context = {
        "Values": values,
        "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
        "Chart": {"Name": described["name"], "Version": described["version"], "AppVersion": described["appVersion"]},
        "Files": chart,
    }
    renderer = _Renderer(context)
    for file in sorted((chart / "templates").glob("*.tpl")):
        renderer.render(file.read_text(), context)
    texts = [renderer.render(file.read_text(), context) for file in sorted((chart / "templates").glob("*.yaml"))]
    assert "{{" not in renderer.render((chart / "templates" / "NOTES.txt").read_text(), context)
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


class _Renderer:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._defined: dict[str, list[Any]] = {}

    def render(self, text: str, dot: Any) -> str:
        nodes, _ = _parse(iter(_tokens(text)))
        return self._run(nodes, dot)

    def _run(self, nodes: list[Any], dot: Any) -> str:
        out = ""
        for node in nodes:
            if isinstance(node, str):
                out += node
                continue
            verb, _, rest = node[0].partition(" ")
            if verb == "define":
                self._defined[json.loads(rest)] = node[1]
            elif verb in ("if", "with"):
                value = self._value(rest, dot)
                inner = node[1] if value else node[2]
                out += self._run(inner, value if verb == "with" and value else dot)
            elif verb == "range":
                out += "".join(self._run(node[1], each) for each in self._value(rest, dot))
            else:
                value = self._value(node[0], dot)
                out += str(value).lower() if isinstance(value, bool) else str(value)
        return out

    def _value(self, pipeline: str, dot: Any) -> Any:
        return self._pipeline(_WORD.findall(pipeline), dot)

    def _pipeline(self, words: list[str], dot: Any) -> Any:
        """Return the value of words up to a closing parenthesis or the end, and remove them."""
        piped: list[Any] = []
        while True:
            function = self._functions[words.pop(0)] if words[0] in self._functions else None
            values = []
            while words and words[0] not in ("|", ")"):
                word = words.pop(0)
                values.append(self._pipeline(words, dot) if word == "(" else self._word(word, dot))
            values += piped
            if function is None:
                (value,) = values
            else:
                value = function(*values)
            if not words or words.pop(0) == ")":
                return value
            piped = [value]

    def _word(self, word: str, dot: Any) -> Any:
        if word.startswith('"'):
            return json.loads(word)
        if not word.startswith((".", "$")):
            return int(word)
        value = self._root if word.startswith("$") else dot
        for part in filter(None, word.removeprefix("$").split(".")):
            value = value[part]
        return value

    @property
    def _functions(self) -> dict[str, Callable[..., Any]]:
        return {
            ".Files.Get": lambda name: (self._root["Files"] / name).read_text(),
            "fail": _fail,
            "and": lambda *values: next((each for each in values if not each), values[-1]),
            "or": lambda *values: next((each for each in values if each), values[-1]),
            "not": lambda value: not value,
            "eq": lambda a, b: a == b,
            "ne": lambda a, b: a != b,
            "int": int,
            "lower": str.lower,
            "include": lambda name, dot: self._run(self._defined[name], dot),
            "toYaml": lambda value: yaml.safe_dump(value).strip().removesuffix("\n...").strip(),
            "nindent": lambda count, text: "\n" + "\n".join(" " * count + line for line in text.splitlines()),
            "quote": lambda value: json.dumps(str(value)),
            "default": lambda fallback, value: value or fallback,
            "add": lambda *numbers: sum(numbers),
            "div": lambda a, b: a // b,
        }


def _fail(text: str) -> None:
    raise ChartError(text)


def _tokens(text: str) -> Iterator[tuple[bool, str]]:
    """Yield texts (False) and the code of actions (True), without the white space that `-` trims."""
    at = 0
    for match in _ACTION.finditer(text):
        yield False, text[at : match.start()]
        yield True, match["code"].strip()
        at = match.end()
    yield False, text[at:]


def _parse(tokens: Iterator[tuple[bool, str]]) -> tuple[list[Any], str]:
    """Return the nodes up to `end` or `else`, and that word with the condition of an `else if`."""
    nodes: list[Any] = []
    for is_action, code in tokens:
        if not is_action:
            nodes.append(code)
        elif code.split()[0] in ("end", "else"):
            return nodes, code
        elif code.split()[0] in ("if", "with", "range", "define"):
            nodes.append(_block(code, tokens))
        else:
            nodes.append((code, [], []))
    return nodes, ""


def _block(code: str, tokens: Iterator[tuple[bool, str]]) -> tuple[str, list[Any], list[Any]]:
    """Return the node of a block, whose `end` is read; an `else if` is a block in its other part."""
    inner, last = _parse(tokens)
    if last == "else":
        return code, inner, _parse(tokens)[0]
    return code, inner, [_block(last.removeprefix("else "), tokens)] if last.startswith("else ") else []
