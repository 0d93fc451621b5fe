"""An exception that nobody foresaw: one request hears of it, and the log explains it.

What such an exception says may quote the request, so neither the answer nor the log repeats its text.
"""

from __future__ import annotations

import logging
import secrets
import traceback

from ts_pippy_handler.errors import PippyError

logger = logging.getLogger(__name__)


def unexpected(error: Exception) -> PippyError:
    """Log an exception's kind and place, and return an error that names the log's entry."""
    number = secrets.token_hex(4)
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    logger.error("error %s: %s, raised in\n%s", number, type(error).__name__, frames)
    return PippyError(f"an internal error, {number}: the server's log says more under this number; it is a defect")
