"""
The slow, costly call behind the answer views.

The model takes one call at a time. Of three callers with one question the third stands in the
queue until its own timeout::

    first call      ####                    answered
    second call     ....####                answered
    third call      ........###             504
"""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import UUID

from django.conf import settings

Answer = dict[str, Any]

# Enough for two of the model's calls, one after the other, and never for three.
TIMEOUT: Final = 0.85


def ask_model(session_id: UUID, message_id: UUID) -> Answer:
    """Return the model's answer. Raise TimeoutError if it doesn't come within TIMEOUT seconds."""
    host = urlsplit(getattr(settings, "MODEL_URL", "http://127.0.0.1:8001")).netloc
    with closing(HTTPConnection(host, timeout=TIMEOUT)) as connection:
        connection.request("GET", f"/answers/{session_id}/{message_id}")
        answer: Answer = json.loads(connection.getresponse().read())
        return answer


async def aask_model(session_id: UUID, message_id: UUID) -> Answer:
    """See ask_model()."""
    return await asyncio.to_thread(ask_model, session_id, message_id)
