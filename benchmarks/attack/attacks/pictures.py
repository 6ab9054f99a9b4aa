"""Pictures that are small as files and large, or slow to decode, as pixels."""

import base64
import io
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from benchmarks.attack.attack import AimMissedError, Attack, Target
from benchmarks.attack.http import post

_MIB = 1 << 20
_LIMIT_S = 60.0  # by when a call has its response


def _png(side: int) -> bytes:
    """Return the file of a black square."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    chunks = [header, b"IDAT" + zlib.compress(bytes((side // 8 + 1) * side), 9), b"IEND"]
    parts = ((len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _jpeg(side: int, scans: int) -> bytes:
    """Return a JPEG with its last scan repeated; each scan is a pass over all pixels."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True, quality=10)
    content = file.getvalue()[:-2]
    return content + content[content.rfind(b"\xff\xda") :] * scans + b"\xff\xd9"


def _gif(frames: int) -> bytes:
    """Return a GIF of many frames."""
    file = io.BytesIO()
    images = [Image.new("P", (512, 512), n % 2) for n in range(2)] * (frames // 2)
    images[0].save(file, "GIF", save_all=True, append_images=images[1:])
    return file.getvalue()


_FILES: dict[str, tuple[str, Callable[[], list[bytes]], str]] = {
    "pixels": ("a PNG of 30,000 x 30,000 pixels", lambda: [_png(30_000)], "400"),
    "many-pixels": ("20 PNGs of 8,192 x 8,192 pixels in a call", lambda: [_png(8192)] * 20, "400"),
    "scans": ("a JPEG of 5,000 scans of 2,048 x 2,048 pixels", lambda: [_jpeg(2048, 5000)], "400"),
    "frames": ("a GIF of 200 frames of 512 x 512 pixels", lambda: [_gif(200)], "200"),
    "broken": ("2,000 broken files", lambda: [b"\x89PNG\r\n\x1a\n" + bytes(n % 64) for n in range(2000)], "400"),
}


def _attack(name: str, about: str, files: Callable[[], list[bytes]], expected: str) -> Attack:
    bodies: list[bytes] = []

    def prepare(_: Path) -> Sequence[str]:
        texts = [base64.b64encode(file).decode() for file in files()]
        tensor = {"name": "picture", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        bodies.append(json.dumps({"inputs": [tensor]}).encode())
        return ()

    def run(target: Target) -> str:
        note = post(target, "/v2/models/Pictures/infer", bodies.pop(), limit_s=_LIMIT_S)
        if not note.startswith(f"{expected} `{{"):
            raise AimMissedError(f"expected {expected} within {_LIMIT_S:g} s, got {note}")
        return note

    # All pictures of a call may have 2^28 pixels, here of a byte each.
    return Attack(
        name=f"pictures-{name}",
        about=about,
        run=run,
        prepare=prepare,
        models=("doubled", "Pictures"),
        body_bytes=_MIB,
        tensor_bytes=(1 << 28) + 64 * _MIB,
    )


ATTACKS = tuple(_attack(name, *rest) for name, rest in _FILES.items())
