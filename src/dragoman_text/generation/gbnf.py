"""Grammars in GBNF (llama.cpp) and the EBNF of xgrammar, converted to Lark.

These formats have no lexer: every rule is a rule of characters, also one of literals and classes alone. The conversion
in llguidance makes such rules terminals, which match greedily, so that `a b` with `a ::= [a-z]+` and `b ::= "z"` would
match no text.
"""

import json
import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<assertion>\(=)
    |(?P<rule>[A-Za-z_][\w-]*)[ \t]*::=
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |(?P<class>\[(?:\\.|[^\]\\\n])*\])
    |(?P<repeat>\{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\})
    |(?P<sign>[|()*+?.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def to_lark(text: str) -> str:
    """Return the grammar in the format of Lark; its first rule is `root`. Raises ValueError if it is invalid."""
    rules: dict[str, list[str]] = {}
    used: dict[str, str] = {}
    body: list[str] = []
    for kind, token in _tokens(text):
        if kind == "rule":
            if token in rules:
                raise ValueError(f"rule '{token}' is defined twice")
            _complete(body)
            body = rules[token] = []
        elif not rules:
            raise ValueError(f"expected a rule, such as 'root ::= ...', got '{token[:20]}'")
        elif kind == "name":
            body.append(used.setdefault(token, f"rule_{len(used)}"))
        else:
            if token in ("|", ")"):
                _complete(body)
            body.append(token)
    _complete(body)
    if "root" not in rules:
        raise ValueError("expected a rule 'root', got none")
    undefined = sorted(used.keys() - rules.keys())
    if undefined:
        raise ValueError(f"rule '{undefined[0][:40]}' is not defined")
    names = {name: used.setdefault(name, f"rule_{len(used)}") for name in rules}
    lines = [f"{names[name]}: {' '.join(tokens)}" for name, tokens in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines])


def _complete(body: list[str]) -> None:
    """Write an alternative without symbols as an empty text."""
    if not body or body[-1] in ("|", "("):
        body.append('""')


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the Lark form of each token, of rules and names the name itself."""
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise ValueError(f"line {line}: unexpected '{text[at : at + 20].splitlines()[0]}'")
        at = match.end()
        if match["assertion"]:
            raise ValueError("look-ahead assertions '(= ...)' are not supported")
        if match["rule"] or match["name"]:
            yield ("rule", match["rule"]) if match["rule"] else ("name", match["name"])
        elif match["text"]:
            yield "text", literal("".join(_characters(match["text"][1:-1])))
        elif match["class"]:
            yield "class", _class(match["class"][1:-1])
        elif match["repeat"]:
            yield "repeat", _repeat(match["least"], match["comma"], match["most"])
        elif match["sign"]:
            yield "sign", r"/(.|\n)/" if match["sign"] == "." else match["sign"]


def _characters(text: str) -> Iterator[str]:
    """Yield the characters of a literal, with escapes resolved."""
    for match in _CHARACTER.finditer(text):
        code = match[1] or match[2] or match[3]
        if code:
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                raise ValueError(f"'{match[0]}' is not a character")
            yield chr(int(code, 16))
        elif match[4]:
            yield _ESCAPES.get(match[4], match[4])
        else:
            yield match[5]


def literal(text: str) -> str:
    """Return a Lark literal: JSON's escapes, and one for the control character that JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _class(text: str) -> str:
    """Return a character class as a regular expression; a hyphen between two characters is a range."""
    negated = text.startswith("^")
    parts = [(match[0], next(_characters(match[0]))) for match in _CHARACTER.finditer(text[negated:])]
    if not parts:
        raise ValueError("a character class must not be empty")
    last = len(parts) - 1
    marks = [
        "-" if source == "-" and 0 < i < last else f"\\x{{{ord(character):x}}}"
        for i, (source, character) in enumerate(parts)
    ]
    return f"/[{'^' if negated else ''}{''.join(marks)}]/"


def _repeat(least: str, comma: str, most: str) -> str:
    if not least and not most:
        raise ValueError("a repetition needs a number, as in {2} or {1,3}")
    return f"{{{least or 0},{most if comma else least}}}"
