"""A pytest plugin: a failure is shown when it happens, for runs that may be cut at a limit."""

import os
import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:  # workers report to one process
        print(f"\n{report.nodeid}\n{report.longreprtext}", file=sys.__stderr__, flush=True)
