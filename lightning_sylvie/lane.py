"""Where an exchange's work runs: at once, or on a thread beside the computation."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, final

import torch
from torch import Tensor

T = TypeVar("T")
_JOIN_LIMIT = 10.0  # seconds a failed lane gets to end; a peer's answer ends its wait


class Arriving(Protocol):
    """What is waited for; see `transport.Pending`."""

    def wait(self) -> Tensor: ...


class Lane(ABC):
    """Runs jobs in the order in which they are given, which must be the same on every rank."""

    @abstractmethod
    def run(self, job: Callable[[], T], *tensors: Tensor) -> T:
        """The job's value, after all jobs before it have begun.

        Args:
            job: An exchange or another collective.
            tensors: What it reads and writes.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises the error of a job that failed, if one has."""

    @abstractmethod
    def give_up(self, error: BaseException) -> None:
        """Lets no job begin any more, because of an error elsewhere."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all jobs and ends the lane; after an error, gives them up. Safe twice."""


@final
class Inline(Lane):
    """The lane of a caller that waits anyway."""

    def run(self, job: Callable[[], T], *tensors: Tensor) -> T:
        return job()

    def check(self) -> None:
        pass

    def give_up(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


class Ticket:
    """A job under way on `Beside`."""

    def __init__(
        self, lane: Beside, begin: Callable[[], Any], finish: Callable[[Any], None]
    ) -> None:
        self._lane, self.begin, self.finish = lane, begin, finish
        self.ready = lane.stream.mark()
        self.done = threading.Event()
        self.end: Any = None

    def wait(self) -> None:
        """Returns when the job's results are there.

        Raises:
            Exception: What it, or a job before it, has failed with.
        """
        self.done.wait()
        self._lane.check()
        self._lane.stream.follow(self.end)


@final
class Beside(Lane):
    """A thread, and on a GPU a stream, beside the computation. Compiled ops let go of the GIL.

    A job has two halves. `begin` codes a message and starts to send it; `finish` takes what was
    received apart. The lane begins what there is to begin, in order, before it waits for the oldest
    exchange under way. After an error it runs nothing more, and tells the error to all who ask.

    The thread starts with the first job.

    Args:
        device: Where messages live.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _Stream() if device.type != "cuda" else _CudaStream(device)
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(
        self, begin: Callable[[], Arriving], finish: Callable[[Tensor], None], *tensors: Tensor
    ) -> Ticket:
        """Has an exchange begun and finished in the background.

        Args:
            begin: Starts it; what it returns is waited for.
            finish: Gets the received rows.
            tensors: What they read and write, which the caller may drop meanwhile.
        """
        return self._submit(Ticket(self, begin, lambda pending: finish(pending.wait())), tensors)

    def start(self, job: Callable[[], Any], *tensors: Tensor) -> Ticket:
        """Has a whole job done in the background."""
        return self._submit(Ticket(self, job, lambda _: None), tensors)

    def run(self, job: Callable[[], T], *tensors: Tensor) -> T:
        values: list[T] = []
        self.start(lambda: values.append(job()), *tensors).wait()
        self.stream.adopt(values[0])
        return values[0]

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_JOIN_LIMIT if self._error else None)
            self._thread = None

    def give_up(self, error: BaseException) -> None:
        self._error = self._error or error

    def _submit(self, ticket: Ticket, tensors: tuple[Tensor, ...]) -> Ticket:
        self.check()
        for tensor in tensors:
            self.stream.borrow(tensor)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="beside", daemon=True)
            self._thread.start()
        self._queue.put(ticket)
        return ticket

    def _serve(self) -> None:
        under_way: deque[tuple[Ticket, Any]] = deque()
        ending = False
        with torch.no_grad(), self.stream.entered():
            while not ending or under_way:
                ticket = None
                with contextlib.suppress(Empty):
                    ticket = self._queue.get(block=not under_way)
                    ending = ending or ticket is None
                if ticket is not None:
                    under_way.append((ticket, self._begin(ticket)))
                elif under_way:
                    self._finish(*under_way.popleft())
                del ticket  # a job refers to the rows that it sends

    def _begin(self, ticket: Ticket) -> Any:
        begun = None
        try:
            if self._error is None:
                self.stream.follow(ticket.ready)
                begun = ticket.begin()
        except BaseException as error:
            self.give_up(error)
        del ticket.begin
        return begun

    def _finish(self, ticket: Ticket, begun: Any) -> None:
        try:
            if self._error is None:
                ticket.finish(begun)
                ticket.end = self.stream.mark()
        except BaseException as error:
            self.give_up(error)
        del ticket.finish
        ticket.done.set()


class _Stream:
    """The stream of a device that has none: work is done when the call returns."""

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Makes it the thread's current stream."""
        return contextlib.nullcontext()

    def mark(self) -> Any:
        """The point that the current stream has reached."""
        return None

    def follow(self, mark: Any) -> None:
        """Has the current stream wait for `mark`."""

    def borrow(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor of another stream until this one has read it."""

    def adopt(self, value: object) -> None:
        """Keeps the memory of a tensor of this stream until the current one has read it."""


class _CudaStream(_Stream):
    """A CUDA stream of its own, ordered against the others by events."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def follow(self, mark: Any) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def borrow(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def adopt(self, value: object) -> None:
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(torch.cuda.current_stream(self._stream.device))
