"""An optimizer whose step sums gradients over the ranks first, for training without Lightning."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_sylvie.gradient import GradientReducer, GradientSum
from lightning_sylvie.transport import connect


class DistributedOptimizer(Optimizer):
    """Another optimizer, before whose every step the gradients of all ranks are summed.

    Everything but `step` is the other optimizer's own: groups of parameters, state, `state_dict`,
    hooks; learning-rate schedulers take it. To clip the sums, or to look at them, call
    `sum_gradients` before `step`, which then sums no more::

        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()))
        loss_of_my_share.backward()
        optimizer.sum_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    All ranks make the same calls, and begin with the same parameters.

    Args:
        optimizer: Its parameters are the same on all ranks, in the same order.
        group: The ranks; None: all. It is not used itself: a group of its own is made of them.
        all_reduce: The name of an algorithm, or a `GradientSum`.
        average: Divide the sums by the number of ranks, for losses that are means over parts of
            equal size.
        timeout: The longest wait for another rank.

    Raises:
        ValueError: For an unknown algorithm.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: ProcessGroup | None = None,
        all_reduce: str | GradientSum = "ring",
        *,
        average: bool = False,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        # Not Optimizer.__init__: groups and state are the other one's, and so are its attributes.
        self.optimizer = optimizer
        self._way = GradientSum.of(all_reduce)
        self._transport = connect(_group_of_same_ranks(group, timeout), timeout=timeout)
        self._scale = 1.0 / self._transport.num_ranks if average else 1.0
        self._summed = False
        self._reducer = self._reduce_all()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # before it is set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r}, all_reduce={self._way.all_reduce!r})"

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replaces every gradient by its sum over the ranks; the next `step` sums no more.

        Raises:
            PeerError: If a rank is gone, or does not answer within the timeout.
        """
        self._reducer.reduce(scale=self._scale)
        self._summed = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sums the gradients, unless they are summed, and steps.

        Args:
            closure: Computes the loss and its gradients anew, as for LBFGS; both are summed each
                time, so that all ranks search along the same line.
        """
        if closure is not None:
            summed: Callable[[], Any] = partial(self._sum_of, closure)
            return self.optimizer.step(summed)
        if not self._summed:
            self.sum_gradients()
        self._summed = False
        return self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._summed = False
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        self._reducer = self._reduce_all()

    def close(self) -> None:
        """Ends the connections to the other ranks."""
        self._transport.close()

    def _reduce_all(self) -> GradientReducer:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return GradientReducer(parameters, self._transport, self._way)

    def _sum_of(self, closure: Callable[[], Any]) -> Tensor:
        loss = torch.as_tensor(closure()).detach().clone()
        self._transport.all_reduce(loss)
        self._reducer.reduce(scale=self._scale)
        return loss * self._scale


def _group_of_same_ranks(group: ProcessGroup | None, timeout: timedelta) -> ProcessGroup | None:
    if not dist.is_initialized():
        return None
    ranks = None if group is None else dist.get_process_group_ranks(group)
    local = group is not None  # the others do not take part
    own: ProcessGroup = dist.new_group(ranks, timeout=timeout, use_local_synchronization=local)
    return own
