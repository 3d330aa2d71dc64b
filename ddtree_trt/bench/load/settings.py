"""What a measurement under load asks for. Imports little: the command line reads the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ddtree_trt.bench.settings import TINY
from ddtree_trt.errors import MAX_COUNT, UsageError, check_range, shown

DEFAULT_METHOD = "default"  # requests that name no method, and so get the server's
BASELINE = "ar"
MAX_CONCURRENCY = 4096
_PER_CLIENT = 4  # requests for each concurrent one, unless their number is given
_FEWEST = 24


@dataclass(frozen=True, order=True)
class Level:
    """How much load: a number of clients that always have a request under way (closed loop), or a rate at which
    requests arrive, whether or not others have been answered (open loop)."""

    concurrency: int | None = None
    rate: float | None = None  # requests per second

    @property
    def load(self) -> float:
        """The place on the axis of a picture."""
        return float(self.concurrency or self.rate or 0)

    def __str__(self) -> str:
        return f"{self.concurrency} concurrent" if self.rate is None else f"{self.rate:g} requests/s"


def check_url(url: str) -> None:
    """Raises UsageError for anything but the address of a server."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise no_url(url, str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise no_url(url)
    if parts.query or parts.fragment:
        raise no_url(url, "what follows ? or # cannot be in it")
    if port == 0:
        raise no_url(url, "no server has port 0")


def no_url(url: str, why: str = "") -> UsageError:
    """The error for a text that is no address of a server."""
    reason = f": {why}" if why else ""
    return UsageError(f"--url must be a URL such as http://localhost:8000, not {shown(url)}{reason}")


@dataclass(frozen=True)
class LoadSettings:
    """Settings of a measurement. Raises UsageError for a value out of range."""

    url: str | None = None  # of a running server, with or without /v1; None: one of `engine` is started
    engine: str | None = None
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    methods: tuple[str, ...] = (DEFAULT_METHOD, BASELINE)
    requests: int | None = None  # of a level and method; None: 4 for each client, 24 at least
    prompts: tuple[str, ...] = (TINY,)
    limit: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0  # of the arrivals and of the requests

    def __post_init__(self) -> None:
        if not self.concurrency and not self.rates:
            raise UsageError("give numbers of concurrent requests with --concurrency, or rates with --rate")
        for clients in self.concurrency:
            check_range("--concurrency", clients, 1, MAX_CONCURRENCY)
        for rate in self.rates:
            check_range("--rate", rate, 0.001, 100_000)
        if self.requests is not None:
            check_range("--requests", self.requests, 1, MAX_COUNT)
            if self.requests < (most := max(self.concurrency, default=0)):
                raise UsageError(f"--requests {self.requests} are fewer than {most} clients; give at least as many")
        check_range("--max-tokens", self.max_tokens, 2, MAX_COUNT)
        check_range("--temperature", self.temperature, 0, 10)
        for option, values in (
            ("--concurrency", self.concurrency),
            ("--rate", self.rates),
            ("--methods", self.methods),
        ):
            if len(set(values)) != len(values):
                raise UsageError(f"{option} has {shown(next(v for v in values if values.count(v) > 1))} twice")
        if not self.methods:
            raise UsageError(f"--methods must name at least one, or {DEFAULT_METHOD}")
        if self.url is not None:
            check_url(self.url)

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(Level(concurrency=c) for c in self.concurrency) + tuple(Level(rate=r) for r in self.rates)

    def requests_at(self, level: Level) -> int:
        """How many requests are measured."""
        return self.requests or max(_FEWEST, _PER_CLIENT * (level.concurrency or 0))
