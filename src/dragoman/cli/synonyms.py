"""Names of options that other programs use for the same meaning."""

from collections.abc import Collection

# Each line has options of one meaning, those of some command first. An option that a command does not have stands for
# the only one of the line that it has; if it has several, they are suggested.
_MEANINGS = (
    ("seconds", "duration", "time", "period"),
    ("warmup-s", "warmup", "warm-up"),
    ("timeout-s", "timeout"),
    ("concurrency", "clients", "users", "parallel", "parallelism", "threads"),
    ("rate", "rps", "qps", "requests-per-second"),
    ("repeat", "repeats", "runs"),
    ("data", "input", "file", "body"),
    ("prompt", "message"),
    ("system", "system-prompt"),
    ("temperature", "temp"),
    ("max-tokens", "max-new-tokens", "max-completion-tokens", "num-predict", "n-predict"),
    ("http-port", "port"),
    ("host", "address", "bind", "listen"),
    ("replicas", "processes", "workers", "instances"),
    ("max-batch-size", "batch-size"),
    ("model-name", "served-model-name"),
    ("key-file", "token-file", "api-key-file"),
    ("ca", "cacert", "cafile", "tls-ca"),
)


def same_meaning(flag: str, known: Collection[str]) -> list[str]:
    """Return the known flags that mean what `flag` does, such as `--seconds` for `--duration`."""
    name = flag.removeprefix("--")
    return [f"--{other}" for line in _MEANINGS if name in line for other in line if f"--{other}" in known]
