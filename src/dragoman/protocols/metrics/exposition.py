"""Formats of metrics: the Prometheus text format and OpenMetrics, compressed with gzip if the client accepts it."""

import math
import time
import zlib
from collections.abc import Iterable, Iterator
from itertools import accumulate

from dragoman.core.metrics import Distribution, Family, Labels

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Samples that are formatted before other threads run: a fraction of a millisecond.
_PIECE = 200
# Shorter texts are not compressed.
_MIN_COMPRESSED = 4096
_GZIP = zlib.MAX_WBITS | 16


def encode(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics if `accept` names it.

    OpenMetrics does not allow colons in names, as in those of vLLM: such metrics are always sent as text. Call it in a
    thread: it lets others run in between, since there may be hundreds of thousands of samples.
    """
    families = [*families]
    is_open = "application/openmetrics-text" in accept and not any(":" in f.name for f in families)
    lines = _lines(families, is_open=is_open)
    text: list[str] = []
    for number, line in enumerate(lines):
        text.append(line)
        if not number % _PIECE:
            time.sleep(0)
    if is_open:
        text.append("# EOF\n")
    return "".join(text).encode(), _OPENMETRICS if is_open else _TEXT


def compress(body: bytes, accept_encoding: str) -> tuple[bytes, bool]:
    """Return the body, compressed with gzip if the client accepts that and it is not short, and whether it is."""
    if len(body) < _MIN_COMPRESSED or "gzip" not in accept_encoding.lower():
        return body, False
    compressor = zlib.compressobj(level=1, wbits=_GZIP)
    return compressor.compress(body) + compressor.flush(), True


def _lines(families: Iterable[Family], *, is_open: bool) -> Iterator[str]:
    for family in families:
        kind: str = family.kind
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        name = family.name
        if is_open:
            help_text = help_text.replace('"', '\\"')
            # OpenMetrics requires the suffix of counters, which TGI's and Triton's names do not have.
            is_unknown = kind == "untyped" or (kind == "counter" and not name.endswith("_total"))
            kind, name = "unknown" if is_unknown else kind, name.removesuffix("_total") if kind == "counter" else name
        yield f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
        for sample in family.samples:
            yield f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n"
        for distribution in family.distributions:
            yield from _distribution(distribution)


def _distribution(sample: Distribution) -> Iterator[str]:
    labels = _labels(sample.labels)
    before = f"{sample.name}_bucket{labels[:-1]}," if labels else f"{sample.name}_bucket{{"
    counts = [*accumulate(sample.counts)]
    for bound, count in zip(sample.bounds, counts, strict=False):
        yield f'{before}le="{bound}"}} {count}\n'
    yield f'{before}le="+Inf"}} {counts[-1]}\n'
    yield f"{sample.name}_sum{labels} {_number(sample.sum)}\n{sample.name}_count{labels} {counts[-1]}\n"


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else str(int(value)) if value == int(value) else repr(value)
