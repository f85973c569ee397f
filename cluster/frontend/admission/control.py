"""Which caller is served, with what priority, and how much of it at once and per minute.

Knows callers by their API key. Knows neither gRPC nor HTTP, and nothing of what a request asks for
but its size in tokens.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config import AuthConfig, ClusterConfig, ConfigError, FrontendConfig
from cluster.frontend.admission.keys import KeyEntry, KeysFile, find
from scheduler.errors import LockstepError, Overloaded
from scheduler.messages import Priority

_RETRY_S = 1.0
"""When one of many requests in flight may have ended; a guess."""
_FORWARDED = frozenset({"forwarded", "x-forwarded-for", "x-real-ip"})
"""Headers with which a peer passes on a call of another machine."""


class Unauthenticated(LockstepError):
    """The caller is unknown."""


class NotAllowed(LockstepError):
    """The caller is known, and may not do this."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller, as far as the transport tells."""

    authorization: Sequence[str] = ()
    """Values of the `authorization` metadata."""
    address: str = ""
    """IP address of the peer without port; empty where the transport does not tell."""
    forwarded: bool = False
    """Whether a header says that the peer passes on a call of another machine."""
    traceparent: str = ""
    """Of W3C's Trace Context, as it came."""

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[str, str | bytes]], address: str) -> Caller:
        """Names of headers in lower case; `address` is the peer's."""
        authorization, keys, forwarded, traceparent = [], [], False, ""
        for name, value in headers:
            if name == "authorization" and isinstance(value, str):
                authorization.append(value)
            elif name == "x-api-key" and isinstance(value, str):  # as Anthropic's clients send it
                keys.append(f"Bearer {value}")
            forwarded |= name in _FORWARDED
            if name == "traceparent" and isinstance(value, str):
                traceparent = value
        authorization = authorization or keys
        return cls(tuple(authorization), address, forwarded, traceparent)

    @property
    def on_loopback(self) -> bool:
        """Whether the call certainly comes from this machine; what is not known is not."""
        return not self.forwarded and is_loopback(self.address)


def check_exposure(config: ClusterConfig) -> None:
    """Raises `ConfigError` for a server that would listen to a network without API keys."""
    host, auth = config.server.http_host, config.auth
    if (
        not auth.has_keys
        and not auth.allow_anyone
        and not (host == "localhost" or is_loopback(host))
    ):
        raise ConfigError(
            f"server.http_host: other machines can reach {host}, but without API keys only this "
            "one is served; set auth.keys_file (--keys-file) or give --api-key, or "
            "auth.allow_anyone (--allow-anyone) to serve every caller that reaches the port"
        )


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


class TokenBucket:
    """Holds one minute's tokens at most, begins full, and fills at a steady rate; the time is an
    argument.

    A request for more than it ever holds passes when it is full and leaves it in debt, so that
    nothing is too large for ever; the debt is paid before anything else is taken.
    """

    def __init__(self, tokens_per_minute: float, now_s: float) -> None:
        self._size = tokens_per_minute
        self._level = tokens_per_minute
        self._filled_s = now_s

    def resize(self, tokens_per_minute: float, now_s: float) -> None:
        """Another rate from now on; what is there stays, as far as it fits."""
        self._fill(now_s)
        self._size = tokens_per_minute

    def take(self, tokens: float, now_s: float) -> float:
        """0 if taken; else the seconds after which they could be, if nobody else takes any."""
        self._fill(now_s)
        missing = min(tokens, self._size) - self._level
        if missing > 0:
            return missing * 60 / self._size
        self._level -= tokens
        return 0.0

    def spend(self, tokens: float, now_s: float) -> None:
        """Take what is used already; more than there is leaves a debt."""
        self._fill(now_s)
        self._level -= tokens

    def give_back(self, tokens: float, now_s: float) -> None:
        """What was taken and not used."""
        self._fill(now_s)
        self._level = min(self._level + tokens, self._size)

    def _fill(self, now_s: float) -> None:
        passed_s = max(now_s - self._filled_s, 0.0)
        self._filled_s = max(now_s, self._filled_s)
        self._level = min(self._level + passed_s * self._size / 60, self._size)


@dataclass(slots=True)
class _Tenant:
    """What the requests of one key have in use."""

    requests_max: float = math.inf
    priority_max: Priority = Priority.HIGH
    bucket: TokenBucket | None = None
    in_flight: int = 0


@dataclass(slots=True)
class Admitted:
    """One call that was admitted, and its account. Leaving the context settles it, once."""

    tenant: str
    """The key's name; empty without keys."""
    priority: Priority
    _use: _Tenant
    _sequences: int
    _clock: Callable[[], float]
    used: int = 0
    """How many tokens the call has used: less than was charged goes back, more is a debt."""
    _charged: tuple[TokenBucket, int] | None = None
    """From which bucket, and how much."""

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, *_: object) -> None:
        if self._charged is not None:
            bucket, charged = self._charged
            if self.used > charged:
                bucket.spend(self.used - charged, self._clock())
            else:
                bucket.give_back(charged - self.used, self._clock())
        self._use.in_flight -= self._sequences

    def charge(self, tokens: int) -> None:
        """Count the tokens that the request is expected to use. Raises Overloaded."""
        bucket = self._use.bucket
        if bucket is None:
            return
        wait_s = bucket.take(tokens, self._clock())
        if wait_s > 0:
            raise _used_up(self.tenant, wait_s)
        self._charged = bucket, tokens

    def spend(self, tokens: int) -> None:
        """Count tokens that were made before their number was known; until a debt is paid the key's
        next call is refused."""
        if self._use.bucket is not None:
            self._use.bucket.spend(tokens, self._clock())


class AdmissionControl:
    """Admits callers. One per frontend process; each enforces its share of a key's limits."""

    def __init__(
        self,
        auth: AuthConfig,
        frontend: FrontendConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises KeysError or OSError for a keys file that cannot be used."""
        self._auth = auth
        self._share = frontend.number
        self._clock = clock
        self._file = KeysFile(Path(auth.keys_file), clock) if auth.keys_file else None
        sha256 = auth.api_key_sha256
        self._one_key = (
            () if sha256 is None else (KeyEntry(name="api-key", sha256=sha256, operator=True),)
        )
        self._tenants: dict[str, _Tenant] = {}

    def check(self, caller: Caller) -> KeyEntry | None:
        """The key that came with the call; None without keys. Raises Unauthenticated."""
        if not self._auth.has_keys:
            if not (self._auth.allow_anyone or caller.on_loopback):
                raise Unauthenticated(
                    "without API keys only calls from the server's own machine are served; make "
                    "keys with `lockstep keys add` and start the server with --keys-file, or "
                    "with --allow-anyone"
                )
            return None
        entries = self._file.entries() if self._file else self._one_key
        entry = find(entries, _bearer(caller.authorization))
        if entry is None:
            raise Unauthenticated("authorization: no valid API key; send 'Bearer <key>'")
        return entry

    def check_operator(self, caller: Caller) -> None:
        """Whether the caller may see what concerns all callers: without keys on this machine, with
        keys by one that has the right. Raises Unauthenticated and NotAllowed."""
        entry = self.check(caller)
        if not (caller.on_loopback if entry is None else entry.operator):
            raise NotAllowed(
                "authorization",
                "this is for keys made with `lockstep keys add --operator`, and on a server"
                " without keys for callers on its own machine",
            )

    def admit(
        self, caller: Caller, sequences: int = 1, field: str = "n", asked: Priority | None = None
    ) -> Admitted:
        """So many more requests in flight, with the priority asked for; `field` says how many.
        Raises Unauthenticated, NotAllowed and Overloaded."""
        entry = self.check(caller)
        name, use = ("", _Tenant()) if entry is None else (entry.name, self._of_key(entry))
        priority = _granted(asked, use.priority_max)
        if sequences > use.requests_max:
            most = use.requests_max
            raise NotAllowed(field, f"{sequences} sequences asked for, at most {most:.0f} at once")
        if use.in_flight + sequences > use.requests_max:
            said = f"{use.in_flight} requests of this key are in flight already"
            raise Overloaded(said, _RETRY_S)
        if use.bucket is not None and (wait_s := use.bucket.take(0, self._clock())) > 0:
            # In debt: said now, before its prompt is tokenized.
            raise _used_up(name, wait_s)
        use.in_flight += sequences
        return Admitted(name, priority, use, sequences, self._clock)

    def _of_key(self, entry: KeyEntry) -> _Tenant:
        use = self._tenants.setdefault(entry.name, _Tenant())
        use.priority_max = entry.priority
        use.requests_max = (
            math.inf if entry.requests_max is None else -(-entry.requests_max // self._share)
        )
        if entry.tokens_per_minute is None:
            use.bucket = None
            return use
        size, now_s = entry.tokens_per_minute / self._share, self._clock()
        if use.bucket is None:
            use.bucket = TokenBucket(size, now_s)
        else:
            use.bucket.resize(size, now_s)
        return use


def _granted(asked: Priority | None, most: Priority) -> Priority:
    """A request's class; without one normal, or the key's if that is lower. Raises NotAllowed."""
    if asked is None:
        return max(Priority.NORMAL, most)
    if asked < most:
        reason = f"{asked.name.lower()} asked for, this key allows {most.name.lower()} at most"
        raise NotAllowed("priority", reason)
    return asked


def _used_up(name: str, wait_s: float) -> Overloaded:
    return Overloaded(f"tokens_per_minute of key {name} are used up", wait_s)


def _bearer(values: Sequence[str]) -> str:
    """The key in the header; empty, which is no key, if there is none or more than one."""
    if len(values) != 1:
        return ""
    scheme, _, key = values[0].partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
