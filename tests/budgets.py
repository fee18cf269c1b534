"""A pytest plugin: each room of `tests/` has a time budget.

`pytest -p tests.budgets` measures the CPU seconds of each room (the folder
below `tests/`), which other work on the machine changes little, lists them,
and fails the run when a room needs more than `room_budgets` in pyproject.toml
allows. Slow tests belong behind the mark `slow`, which `make test` leaves out.
"""

import collections
import pathlib
import time
import tomllib

import pytest

HERE = pathlib.Path(__file__).parent


def pytest_configure(config):
    config.pluginmanager.register(Budgets())


class Budgets:
    def __init__(self):
        settings = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
        self.limits = settings["tool"]["keras_transformer"]["room_budgets"]
        self.spent = collections.Counter()

    def limit(self, room):
        return self.limits.get(room, self.limits["default"])

    @property
    def exceeded(self):
        return [r for r, spent in self.spent.items() if spent > self.limit(r)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.spent[room_of(item.path)] += time.process_time() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if self.exceeded and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("CPU seconds of each room and its budget")
        for room, spent in sorted(self.spent.items()):
            line = f"{room:14} {spent:7.1f} of {self.limit(room):.0f}"
            over = "  OVER BUDGET" * (room in self.exceeded)
            terminalreporter.write_line(line + over, red=bool(over))


def room_of(path):
    try:
        parts = path.relative_to(HERE).parts
    except ValueError:
        return path.parent.name
    return parts[0] if len(parts) > 1 else "package"
