"""Requests that browsers send for pages of other origins, and how they are recognised.

Any page may let a browser send requests to any address, this machine's loopback addresses included; the page cannot
read the answers, but the server has done the work. Three headers, which pages cannot choose, reveal such requests:

- ``Origin``: browsers send it with every POST, and with every request whose answer the page wants to read.
- ``Sec-Fetch-Site``: browsers send it with the other requests (images, scripts) to this machine, or over TLS.
- ``Host``: a page whose name is resolved to this machine only after it was loaded (DNS rebinding) is of the server's
  own origin, but under the page's name.

gRPC needs no such check: pages cannot send the header ``te`` that gRPC requires.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.options import ServerOptions

#: Media types of bodies; pages of other origins can only send others unless the server answers a preflight request.
_MEDIA_TYPES = (b"application/json", b"application/octet-stream")
_OTHER_SITES = (b"cross-site", b"same-site")
_ANY = "*"


@dataclass(frozen=True, slots=True)
class SenderRules:
    """Rules for the origins and the host names of requests."""

    #: Origins of other pages that may send requests, or ``*``.
    origins: frozenset[str]
    #: Names that a request may address the server by, besides IP addresses; None for all names.
    names: frozenset[str] | None

    @classmethod
    def of(cls, options: ServerOptions) -> SenderRules:
        """Return the rules of a server; names are checked if it listens on a loopback address only."""
        origins = frozenset(options.cors)
        if _ANY in origins or not is_loopback(options.http[0]):
            return cls(origins, None)
        proxies = {urlsplit(origin).hostname or "" for origin in origins}
        return cls(origins, frozenset({"localhost", options.http[0].lower(), *proxies}))

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Check the headers of a request.

        Raises:
            RequestFailure: A page of another origin has sent it, or its body has another media type.
        """
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if self.names is not None and host and (name := _host_name(host)) and name not in self.names:
            raise _forbidden(
                f"Host {_shown(host)}: expected localhost or an IP address; other names need --cors https://NAME"
            )
        if origin is not None:
            self._check_origin(origin, host)
        elif headers.get(b"sec-fetch-site") in _OTHER_SITES and headers.get(b"sec-fetch-mode") != b"navigate":
            raise _forbidden("a page of another origin has sent the request; --cors SCHEME://HOST allows its origin")
        if method == "POST" and (given := headers.get(b"content-type")) and given not in _MEDIA_TYPES:
            _check_media_type(given)

    def _check_origin(self, origin: bytes, host: bytes) -> None:
        # The scheme is not compared: behind a proxy that ends TLS, it differs.
        own = bool(host) and origin.partition(b"://")[2].lower() == host.lower()
        if not (own or _ANY in self.origins or origin.decode("latin-1") in self.origins):
            raise _forbidden(f"Origin {_shown(origin)}: not the server's own; --cors SCHEME://HOST[:PORT] adds others")


def is_loopback(host: str) -> bool:
    """Return whether a server that is bound to an address, or to a name, is reached from this machine only."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


@functools.lru_cache
def _host_name(host: bytes) -> str:
    """Return the name in a header ``Host``, in lower case; empty for an IP address."""
    try:
        name = urlsplit(b"//" + host).hostname or b"?"
    except ValueError:  # unpaired brackets
        name = b"?"
    text = name.decode("latin-1").removesuffix(".")
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return text
    return ""


def _check_media_type(given: bytes) -> None:
    if given.partition(b";")[0].strip().lower() not in _MEDIA_TYPES:
        expected = "expected application/json, or application/octet-stream with binary tensors; for curl, use --json"
        raise RequestFailure(Status.MEDIA_TYPE, f"Content-Type {_shown(given)}: {expected}")


def _forbidden(message: str) -> RequestFailure:
    return RequestFailure(Status.FORBIDDEN, message)


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
