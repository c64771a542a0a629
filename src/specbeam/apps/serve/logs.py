"""The log of the server: a line of JSON per event, on standard error."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

LOG = logging.getLogger("specbeam.serve")
UVICORN = logging.getLogger("uvicorn.error")


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time, level, message, the record's own fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def set_up_log(level: str = "info") -> None:
    """Write the log of the server and of uvicorn to standard error. Failing to write it fails no request.

    Args:
        level: "debug", "info", "warning" or "error"; uvicorn's own messages are written from "warning" on.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for logger, lowest in ((LOG, logging.DEBUG), (UVICORN, logging.WARNING)):
        logger.addHandler(handler)
        logger.setLevel(max(logging.getLevelName(level.upper()), lowest))
        logger.propagate = False
