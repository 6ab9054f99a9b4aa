"""The limit of open files of this process."""

import sys

# More than any server here has use for; some programs walk through all numbers up to the limit.
_MOST = 1 << 16


def allow() -> int:
    """Raise the soft limit of open files to the hard limit; return it, or 0 if there is none.

    Systems keep the soft limit at 1024 for programs that use `select`, and expect others to raise it.
    """
    if sys.platform == "win32":
        return 0
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def limit() -> int:
    """Return how many files this process may have open; 0 if there is no limit."""
    if sys.platform == "win32":
        return 0
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else soft
