"""Connections to Ray clusters; the package ray is the extra ``ray``."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

from chrion.common.installation import install_hint
from chrion.errors import OptionError

#: Time limit in seconds for a connection to the address of a cluster, many times that of a slow network.
_CONNECT_TIMEOUT_S = 5.0


@contextlib.contextmanager
def connected(address: str, subject: str) -> Iterator[None]:
    """Connect to a cluster, and disconnect at the end; a connection that this process has already is used and kept.

    Args:
        address: The address of the cluster, ``auto`` for the cluster of this machine, or ``local`` for a new one on
            this machine.
        subject: What needs Ray, for the message.

    Raises:
        OptionError: Ray is not installed, or the cluster is not reachable.
    """
    try:
        import ray  # noqa: PLC0415 # an optional dependency
    except ImportError as error:
        raise OptionError(f"{subject} needs the package ray", hint=install_hint("ray")) from error
    if ray.is_initialized():
        yield
        return
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise OptionError(f"--ray {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise OSError at once if nothing listens at ``host:port``; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in address:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
