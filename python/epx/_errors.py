"""Exceptions: one class for each negative status of libepx, each with the status's name, number and the library's message."""
import builtins
from typing import Dict, Type


class Error(Exception):
    """A call of libepx failed.

    status   name in epx_status.h, such as "EPX_ERR_PEER"
    code     its number
    message  what epx_last_error() said: field, value and legal values; or phase, peer, epoch, expected and seen
    """

    status = "EPX_ERR"
    code = 0

    def __init__(self, message: str):
        super().__init__(f"{self.status}: {message}")
        self.message = message


class ArgumentError(Error, ValueError):
    status, code = "EPX_ERR_ARG", -101


class StateError(Error, RuntimeError):
    status, code = "EPX_ERR_STATE", -102


class UnsupportedError(Error, NotImplementedError):
    status, code = "EPX_ERR_UNSUPPORTED", -103


class MismatchError(Error, ValueError):
    status, code = "EPX_ERR_MISMATCH", -104


class CapacityError(Error, ValueError):
    status, code = "EPX_ERR_CAPACITY", -105


class NotFoundError(Error, LookupError):
    status, code = "EPX_ERR_NOT_FOUND", -106


class OutOfMemoryError(Error, MemoryError):
    status, code = "EPX_ERR_NOMEM", -201


class SystemFailure(Error):
    status, code = "EPX_ERR_OS", -202


class TransferError(Error):
    status, code = "EPX_ERR_IO", -203


class FormatError(Error, ValueError):
    status, code = "EPX_ERR_FORMAT", -204


class TimeoutError(Error, builtins.TimeoutError):
    status, code = "EPX_ERR_TIMEOUT", -301


class PeerError(Error, ConnectionError):
    status, code = "EPX_ERR_PEER", -302


class AbortedError(Error):
    status, code = "EPX_ERR_ABORTED", -401


class InternalError(Error):
    status, code = "EPX_ERR_INTERNAL", -501


class LibraryNotFoundError(ImportError):
    """libepx.so.0 was not found, or is not the one this package was written for; the message lists what was tried."""


BY_CODE: Dict[int, Type[Error]] = {
    c.code: c
    for c in (ArgumentError, StateError, UnsupportedError, MismatchError, CapacityError, NotFoundError, OutOfMemoryError,
              SystemFailure, TransferError, FormatError, TimeoutError, PeerError, AbortedError, InternalError)
}
