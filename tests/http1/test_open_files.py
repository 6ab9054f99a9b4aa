"""The limit on open files is raised, for more connections than the default."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from dragoman.system.process import raise_open_files_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
limit = raise_open_files_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard), limit
print(limit > 256, raise_open_files_limit() == limit)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_the_soft_limit_is_raised() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
