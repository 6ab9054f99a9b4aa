"""Keys of an honest and a hostile client of one server."""

from collections.abc import Sequence
from pathlib import Path

from dragoman.access.grants import EVERYTHING, Grant
from dragoman.access.keys import StoredKey, digest_of, write_keys

KEYS = {name: f"the key of the client '{name}'" for name in ("honest", "hostile")}


def key_flags(folder: Path) -> Sequence[str]:
    """Write the keys to a file in the folder, and return the flags for it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "keys.toml"
    write_keys(file, [StoredKey(digest_of(key), Grant(name, EVERYTHING)) for name, key in KEYS.items()])
    return "--api-keys", str(file)


def bearer(name: str) -> dict[str, str]:
    """Return the headers of a client."""
    return {"authorization": f"Bearer {KEYS[name]}"}
