"""What can be wrong with a request, as the client will see it.

Owns the one exception of the gateway, with the status that it becomes. The SDK raises a separate error for each one.
"""

from pipeline.errors import RollcallError


class ApiError(RollcallError):
    """A request that is refused; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type["ApiError"], tuple[str, int]]:
        return type(self), (str(self), self.status)


class NotFoundError(ApiError):
    """What was asked for is not there, or another key's."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message, status)


class OverLimitError(ApiError):
    """The store cannot take anything just now; clients wait and ask again."""

    def __init__(self, message: str, status: int = 402) -> None:
        super().__init__(message, status)
