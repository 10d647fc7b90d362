"""Says at the end which kinds of tests ran and why others did not: a green run must not be read as proof of what was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("unit", "golden", "oracle", "property", "e2e", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/<name>, or writes it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"{name} changed; look at the difference, then run pytest --update-golden"

    return compare


def _kind(nodeid: str) -> str:
    """The folder under tests/ names the kind."""
    parts = Path(nodeid.split("::", 1)[0]).parts
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else "other"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a kind of test, then the reasons of all skips."""
    ran: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        ran.update(_kind(report.nodeid) for report in terminalreporter.stats.get(outcome, []) if report.when == "call")
    for report in terminalreporter.stats.get("skipped", []):
        skipped[_kind(report.nodeid)] += 1
        detail = report.longrepr
        reasons[detail[2].removeprefix("Skipped: ") if isinstance(detail, tuple) else str(detail)] += 1
    terminalreporter.section("kinds of tests")
    for kind in (*KINDS, *sorted((set(ran) | set(skipped)) - set(KINDS))):
        words = f"{ran[kind]} ran" + (f", {skipped[kind]} skipped" if skipped[kind] else "")
        terminalreporter.write_line(f"{kind:<9} {words if ran[kind] or skipped[kind] else 'none here'}")
    deselected = len(terminalreporter.stats.get("deselected", []))
    if deselected:
        terminalreporter.write_line(f"{deselected} left out by the selection (nightly suites: make nightly)")
    for reason, times in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {times} x: {reason}")
