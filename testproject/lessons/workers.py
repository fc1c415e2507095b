"""What the worker processes of ``race`` have to give."""

from __future__ import annotations

from typing import Final

# A thread holds memory and a database connection; the calls beyond wait for their turn.
MAX_THREADS: Final = 40

# A site leaves this to the default, at most half of a process's threads: a caller that waits for
# another one's answer holds its thread, and the other half is for other requests. Here there are no
# others, every caller is to be served, and one process may well get all of them.
MAX_FOLLOWERS: Final = MAX_THREADS
