"""The server names no vendor: its feature declares what one of them does differently, as values that the edge reads.

`vendor_names.txt` lists the modules of the server that still name one, and only gets shorter.
"""

import ast
import re
from pathlib import Path

SERVER = Path(__file__).parents[2] / "src" / "dragoman"
LISTED = Path(__file__).with_name("vendor_names.txt")
VENDORS = re.compile("mlserver|triton|lmi|djl|tgi|vllm|seldon", re.I)
# A word of names in code: `has_texts_of_mlserver` and `TritonConfig` name a vendor, `oftgiven` does not.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*")


def vendors_of(path: Path) -> set[str]:
    """Return the vendors in the identifiers and strings of a module, not in docstrings and comments."""
    found: set[str] = set()
    source = path.read_text()
    if not VENDORS.search(source):
        return found
    for node in ast.walk(ast.parse(source)):
        # Also docstrings and other strings that are a statement, whose constant is no longer reached then.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    found |= {word.lower() for word in WORD.findall(text) if VENDORS.fullmatch(word)}
                    found |= {name for name in ("mlserver", "vllm") if name in text.lower()}
    return found


def test_the_modules_that_name_a_vendor_are_listed_and_get_fewer() -> None:
    named = {str(path.relative_to(SERVER)): vendors_of(path) for path in SERVER.rglob("*.py")}
    lines = [f"{path}: {' '.join(sorted(vendors))}" for path, vendors in sorted(named.items()) if vendors]
    assert lines == LISTED.read_text().splitlines(), "an entry may be removed from the list, none may be added"
