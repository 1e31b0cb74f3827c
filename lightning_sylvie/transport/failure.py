"""Why an exchange broke: what the ranks leave for each other in the store when one of them fails.

A rank that raises writes its reason before it closes its connections. Ranks that see a connection
break, or wait in vain, write which rank they waited for, close theirs as well, and then look the
first reason up. A rank that was killed or hangs writes nothing and is known by that.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

_STORE_LIMIT = 2.0  # seconds for one look at the store, which may be as dead as its rank
_ROLL_CALL = 2.0  # seconds for the other ranks to say whom they waited for
_LINGER = 1.0  # seconds rank 0 keeps the store up for the others
_BROKEN = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "timeout caused pair closure",
    "Connection refused",
    "Socket closed",
)


class PeerError(RuntimeError):
    """Another rank failed, died or does not answer.

    Attributes:
        rank: The rank at fault as far as it is known, else None.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Store(Protocol):
    """What is used of a `torch.distributed` store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class FailureLog:
    """The failure records of one group of ranks.

    Args:
        store: A store client of its own: an operation that blocks on it must not block others.
        rank: This rank.
        num_ranks: Ranks of the group.
        timeout: How long the ranks wait for each other; for messages only.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout

    def report(self, exception: BaseException) -> None:
        """Records why this rank fails; call it before its connections are closed.

        The first reason of all ranks stays. An error that is itself the echo of a broken
        connection is recorded as such and never as the reason.
        """
        if is_echo(exception):
            self.record(getattr(exception, "rank", None), exception)
            return
        reason = json.dumps([self._rank, one_line(exception)])
        self._try(lambda: self._store.compare_set("cause", "", reason))

    def linger(self) -> None:
        """Rank 0 serves the store: it gives the others a moment to look the reason up."""
        self._linger(set(range(self._num_ranks)) - {self._rank})

    def record(self, peer: int | None, error: BaseException) -> None:
        """Notes whom this rank waited for in vain (None: any rank); call it before closing."""
        self._try(lambda: self._record(peer, error))

    def explain(self, peer: int | None, waiting: str, error: BaseException) -> PeerError:
        """The error to raise after `record` and the closing of the connections.

        Args:
            peer: The rank waited for, None in a collective.
            waiting: What this rank waited for, as in "halo rows in exchange 3".
            error: What the backend said.
        """
        context = f"while rank {self._rank} waited for {waiting}"
        try:
            cause, victims = self._roll_call()
            self._linger(set(victims) - {self._rank})
        except _StoreGoneError:
            return self._store_gone(peer, context, error)
        if cause is not None:
            rank, reason = cause
            return PeerError(f"rank {rank} failed: {reason} ({context})", rank=rank)
        return self._without_cause(victims, peer, context, error)

    def _record(self, peer: int | None, error: BaseException) -> None:
        order = self._store.add("num_victims", 1)
        record = json.dumps([peer, "imed out" in str(error), order])
        self._store.set(f"victim/{self._rank}", record)

    def _roll_call(self) -> tuple[tuple[int, str] | None, dict[int, _Victim]]:
        """The first reason, else whom each rank waited for once all but one rank have said so."""
        deadline = time.monotonic() + _ROLL_CALL
        while True:
            cause, victims = _bounded(self._look)
            done = cause is not None or len(victims) >= self._num_ranks - 1
            if done or time.monotonic() > deadline:
                _bounded(lambda: self._store.set(f"done/{self._rank}", ""))
                return cause, victims
            time.sleep(0.02)

    def _look(self) -> tuple[tuple[int, str] | None, dict[int, _Victim]]:
        cause = json.loads(self._store.get("cause")) if self._store.check(["cause"]) else None
        victims = {
            rank: _Victim(*json.loads(self._store.get(f"victim/{rank}")))
            for rank in range(self._num_ranks)
            if self._store.check([f"victim/{rank}"])
        }
        return cause, victims

    def _without_cause(
        self, victims: dict[int, _Victim], peer: int | None, context: str, error: BaseException
    ) -> PeerError:
        timed_out = any(victim.timed_out for victim in victims.values())
        culprits = _culprits(victims, peer, self._num_ranks, timed_out)
        names = "rank " + ", ".join(map(str, culprits))
        if timed_out and culprits == [self._rank]:
            text = f"the other ranks gave {names} up after {self._timeout} ({context}): it was too "
            return PeerError(text + "slow for `timeout`, or in another place", rank=self._rank)
        if timed_out:
            text = f"{names} did not answer within {self._timeout} ({context}): it hangs, left the "
            text += "common order of exchanges, or needs a longer `timeout`"
            return PeerError(text, rank=culprits[0])
        text = f"{names} ended or lost its connection and left no reason ({context}): look at its "
        text += f"own output, it may have been killed. {one_line(error)}"
        return PeerError(text, rank=culprits[0])

    def _store_gone(self, peer: int | None, context: str, error: BaseException) -> PeerError:
        rank = peer if self._rank == 0 else 0
        return PeerError(
            "rank 0 or its host is gone or hangs: the store that the ranks share there does not "
            f"answer, so no reason can be looked up ({context}). {one_line(error)}",
            rank=rank,
        )

    def _linger(self, others: set[int]) -> None:
        if self._rank != 0:
            return
        keys = [f"done/{rank}" for rank in others]
        deadline = time.monotonic() + _LINGER
        while time.monotonic() < deadline and not self._try(lambda: self._store.check(keys)):
            time.sleep(0.02)

    def _try(self, action: Callable[[], T]) -> T | None:
        try:
            return _bounded(action)
        except _StoreGoneError:
            return None


class _StoreGoneError(Exception):
    """The store does not answer."""


def is_echo(exception: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(exception, PeerError):
        return True
    return isinstance(exception, RuntimeError) and any(sign in str(exception) for sign in _BROKEN)


def one_line(exception: BaseException) -> str:
    """Type and first line of an exception, without gloo's source path and its advice."""
    lines = str(exception).strip().splitlines()
    if not lines:
        return type(exception).__name__
    text = re.sub(r"^\[\S+\.cc:\d+\] ", "", lines[0]).partition(". This is typically")[0]
    return f"{type(exception).__name__}: {text[:500]}"


class _Victim(NamedTuple):
    """A rank that waited in vain."""

    peer: int | None  # whom it waited for; None: for all
    timed_out: bool  # else its connection broke
    order: int  # the number of ranks that had said so, itself included


def _culprits(
    victims: dict[int, _Victim], peer: int | None, num_ranks: int, timed_out: bool
) -> list[int]:
    """The ranks at fault, given whom the others and this rank (`peer`) waited for.

    That is the silent rank at the end of the chain of waits, or else all silent ones. If all ranks
    spoke: the last after a time-out, as it came too late; the first after a broken connection.
    """
    silent = [rank for rank in range(num_ranks) if rank not in victims]
    if not silent:
        by_order = sorted(victims, key=lambda rank: victims[rank].order)
        return [by_order[-1] if timed_out else by_order[0]]
    for _ in range(num_ranks):
        if peer in victims:
            peer = victims[peer].peer
    return [peer] if peer in silent else silent


def _bounded(action: Callable[[], T]) -> T:
    """The action's value; a client blocks for good on a store whose process has been stopped."""
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(action())
        except Exception as error:  # whatever it is, there is no answer
            errors.append(error)

    thread = threading.Thread(target=run, name="failure-log", daemon=True)
    thread.start()
    thread.join(_STORE_LIMIT)
    if not values:
        raise _StoreGoneError(str(errors[0]) if errors else "no answer from the store")
    return values[0]
