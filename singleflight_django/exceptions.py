"""What can go wrong, one class per meaning. The HTTP status of each is in ``responses``."""

from __future__ import annotations


class SingleFlightError(Exception):
    """Base of all errors of this library. Do not raise directly.

    ``key`` is the key that the error is about, namespace included, or "" where there is none yet.
    """

    def __init__(self, message: str = "", *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class LeaseConflictError(SingleFlightError):
    """Someone else holds the lease (a conflict). ``retry_after``: seconds until it ends unless renewed."""

    def __init__(self, message: str = "", *, key: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message, key=key)
        self.retry_after = retry_after


class LeaseLostError(SingleFlightError):
    """The lease ended while its holder was still at work: expired, evicted, or taken by someone else."""


class FlightTimeoutError(SingleFlightError, TimeoutError):
    """A follower's ``wait`` was used up before its flight ended."""


class LeaderFailedError(SingleFlightError):
    """The leader raised or answered 5xx, or too many leaders of one flight died."""


class TooManyFollowersError(SingleFlightError):
    """``max_followers`` callers wait in this process already: one more could occupy its last worker."""


class NestedFlightError(SingleFlightError):
    """The key is already held in this very context: waiting for it would never end."""


class WaitInTransactionError(SingleFlightError):
    """Waiting inside an open transaction: it would pin a connection and never see the leader's commit."""


class StoreUnavailableError(SingleFlightError):
    """The store did not answer, or refused to work. Says nothing about who holds the lease."""


class KeyFieldError(SingleFlightError):
    """A field that the key needs is missing, ambiguous or malformed in this request.

    ``field`` is the field as the template writes it. ``too_large`` tells that the body was over
    ``DATA_UPLOAD_MAX_MEMORY_SIZE``, so that the field could not be read at all.
    """

    def __init__(
        self, message: str = "", *, key: str = "", field: str = "", too_large: bool = False
    ) -> None:
        super().__init__(message, key=key)
        self.field = field
        self.too_large = too_large


class FingerprintMismatchError(SingleFlightError):
    """Same identity, different content: this is another request than the one in flight."""


class UnshareableResultError(SingleFlightError):
    """The leader's outcome may not, or could not, be given to anyone else."""


class ContentionError(SingleFlightError):
    """The database gave up what a view wrote: a deadlock, a serialization failure, a lock not had."""


class DuplicateError(SingleFlightError):
    """The row exists already, says a unique constraint of the database."""


class DuplicateMismatchError(DuplicateError):
    """The row that exists isn't the one asked for: it differs, or the caller may not see it."""
