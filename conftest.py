"""Settings of all tests: no deadline for properties on a busy machine, and reports that any terminal can print."""

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_report_to_serializable(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Escape lone surrogates in captured logs: pytest-xdist sends reports as UTF-8 and ends where it cannot."""
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
