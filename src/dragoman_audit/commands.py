"""The command `dragoman audit`."""

from dragoman.cli.command import Command

AUDIT = Command("check that no line of an audit log was changed or removed", "dragoman_audit.audit_command")
