"""How long what nobody asked for again is kept.

Owns the rules by which requests and sessions are dropped. Promises that nothing is dropped which a trainer may have to
do again, and that a client which lost its connection finds its result for an hour. Pure. Times are seconds since the
epoch."""

from pipeline.tinker.entities import Session
from pipeline.tinker.model_requests import Request

SERVED_SECONDS, UNFETCHED_SECONDS = 3600.0, 86400.0
"""How long a result is kept after a client got it, as it may ask again when its connection broke; and if none asks."""
ENDED_SECONDS = 86400.0
"""How long a session is known after its end, with its sampling clients."""


def request_is_over(request: Request, now: float, *, gone: bool) -> bool:
    """Whether neither a client nor a trainer will ask for a request again; `gone`: its model is."""
    if not request.answered or (request.open and request.failure is None):
        return False
    if request.served:
        return now - request.served > SERVED_SECONDS
    return now - request.answered > (SERVED_SECONDS if gone else UNFETCHED_SECONDS)


def session_is_over(session: Session, now: float) -> bool:
    """Whether a session ended more than `ENDED_SECONDS` ago: its client is gone, too."""
    return bool(session.ended) and now - session.ended_at > ENDED_SECONDS
