"""Declaration of the command of this package."""

from dragoman.cli.command import Command

BATCH = Command("run the requests in a file, one a line", "dragoman_batches.cli.batch")
