"""The log of the server: a line of JSON per event, on standard error."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from specbeam.doors import compilation_line, compilation_watch

EVERY_S = 15.0  # seconds between two lines while steps are compiled
LOG = logging.getLogger("specbeam.serve")
UVICORN = logging.getLogger("uvicorn.error")
WARNINGS = logging.getLogger("py.warnings")  # of Python


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time, level, message, the record's own fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage().strip(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


class CompilationLog:
    """Logs that steps are compiled: at once, and every `EVERY_S` seconds while it goes on.

    Args:
        waiting: returns the ids of the requests in progress.
    """

    def __init__(self, waiting: Callable[[], Iterable[str]]) -> None:
        self._waiting = waiting
        self._next = 0.0  # clock time from which the next line may be written

    def look(self, now: float) -> None:
        """Write a line if steps are compiled and none was written for some time.

        Args:
            now: clock time (`time.monotonic`).
        """
        text = compilation_text()
        if not text or now < self._next:
            return
        self._next = now + EVERY_S
        LOG.info("%s", text, extra={"fields": {"requests": [*self._waiting()]}})


def compilation_text() -> str:
    """Return how many steps are compiled; "" if none is compiled now."""
    found = compilation_watch().progress
    if found is None:
        return ""
    return compilation_line(found["done"] or 0, found["total"])


@contextmanager
def json_alone() -> Iterator[None]:
    """Keep other lines than JSON from standard error, unless it is a terminal: progress and warnings.

    `CompilationLog` says how far compilation is, and warnings are logged.
    """
    before = os.environ.get("SPECBEAM_PROGRESS")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ["SPECBEAM_PROGRESS"] = "off"
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        if before is None:
            os.environ.pop("SPECBEAM_PROGRESS", None)


def set_up_log(level: str = "info") -> None:
    """Write the log of the server and of uvicorn to standard error. Failing to write it fails no request.

    Args:
        level: "debug", "info", "warning" or "error"; uvicorn's own messages are written from "warning" on.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for logger, lowest in ((LOG, logging.DEBUG), (UVICORN, logging.WARNING), (WARNINGS, logging.DEBUG)):
        logger.addHandler(handler)
        logger.setLevel(max(logging.getLevelName(level.upper()), lowest))
        logger.propagate = False
