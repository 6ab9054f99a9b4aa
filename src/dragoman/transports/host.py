"""The syntax of a request's host, as in the field Host and in the authority of a target (RFC 3986, 3.2)."""

import re

_HOST = re.compile(r"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?", re.ASCII)


def is_host(text: str) -> bool:
    """Whether it is `host` or `host:port`. It may be empty (RFC 9110, 7.2); user information is not part of it."""
    return _HOST.fullmatch(text) is not None
