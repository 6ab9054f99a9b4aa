"""The line that describes a model: from a docstring, or the README.md beside its file. Plain text without markup."""

import re

MAX_CHARACTERS = 200

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(`])")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|etc|approx|no|fig)|\b[A-Z])\.$", re.IGNORECASE)
_FRONT_MATTER = re.compile(r"\A---\s*\n.*?\n(?:---|\.\.\.)\s*(?:\n|\Z)", re.DOTALL)
# Bounded or open to the end, so that no text takes more than linear time.
_FENCE = re.compile(r"^(```|~~~).*?(?:^\1[^\n]*$|\Z)", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_ELEMENT = re.compile(r"<(style|script|table|svg|details)\b.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,1000}>")
_TARGET = r"(?:\([^()]{0,1000}\)|\[[^\[\]]{0,300}\])"
_PICTURE = re.compile(rf"\[?!\[[^\[\]]{{0,300}}\]{_TARGET}?(?:\]{_TARGET}?)?")
_LINK = re.compile(rf"\[([^\[\]]{{0,300}})\]{_TARGET}")
_MARKUP = re.compile(r"(\*\*|__|\*|`+)(?=\S)([^\n]{1,300}?)(?<=\S)\1")
# Lines that are not prose: headings, quotes, tables, lists, rules, directives and definitions of links.
_NOT_PROSE = re.compile(r"^\s{0,3}(#|>|\||[-*+]\s|\d+[.)]\s|[-=*_]{3,}\s*$|\.\. |:\w+:|\[[^\]]+\]:)")
_MIN_WORDS = 3  # fewer are a caption or a badge


def one_line(text: object) -> str:
    """Return a text as one line of at most `MAX_CHARACTERS`, cut after a word; "" for what is not text."""
    if not isinstance(text, str):
        return ""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 8 * MAX_CHARACTERS]).split())
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1].rsplit(" ", 1)[0].rstrip(" ,;:") + "…"


def first_sentence(text: object) -> str:
    """Return the first sentence of a docstring as one line."""
    if not isinstance(text, str):
        return ""
    paragraph = re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0]
    line = " ".join(paragraph.split())
    for end in _SENTENCE_END.finditer(line):
        if not _ABBREVIATION.search(line[: end.start()]):
            line = line[: end.start()]
            break
    return one_line(line)


def first_paragraph(markdown: str) -> str:
    """Return the first sentences of prose in a README as one line: after YAML, headings, badges, HTML and code."""
    text = _FRONT_MATTER.sub("", markdown.lstrip("\ufeff"), count=1)
    for pattern in (_COMMENT, _FENCE, _ELEMENT, _PICTURE, _TAG):
        text = pattern.sub("", text)
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").split("\n")
        while lines and (_NOT_PROSE.match(lines[0]) or not lines[0].strip()):
            lines.pop(0)
        if len(lines) > 1 and re.fullmatch(r"\s*(=+|-+)\s*", lines[1]):  # a heading with a line below it
            lines = lines[2:]
        if lines and not lines[0].startswith(("    ", "\t")):
            prose = " ".join(" ".join(lines).split())
            plain = _MARKUP.sub(r"\2", _LINK.sub(r"\1", prose))
            if len(plain.split()) >= _MIN_WORDS and not plain.endswith(":"):
                return one_line(plain)
    return ""
