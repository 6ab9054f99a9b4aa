"""The three sizes at which the server treats messages and arrays in another way.

Another threshold that chooses a second path needs a gain of 10 % on a workload of `benchmarks`, written beside it.
Limits that protect the server from large requests are settings, or stand where they are checked.
"""

from typing import Final

# Up to this many bytes: copied and joined into one buffer, and parsed or formatted at once on the event loop.
INLINE: Final = 16 << 10
# From this many bytes on: not copied, but received into an own buffer and passed on as a view or in shared memory.
SHARED: Final = 64 << 10
# Above this many bytes: parsed, formatted or hashed in a thread, so that the event loop does not wait.
THREAD: Final = 1 << 20
