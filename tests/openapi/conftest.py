"""A key file, as the tests of authentication have it."""

from access.conftest import keys as keys
