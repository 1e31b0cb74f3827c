"""All-reduce by recursive doubling."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_sylvie.all_reduce.algorithm import AllReduce
from lightning_sylvie.all_reduce.team import Team, team_path, team_size, team_values_sent
from lightning_sylvie.transport import Transport


@final
class RecursiveDoubling(AllReduce):
    """Pairs at distance 1, 2, 4, … swap all they have and both add: log2 N steps, for small data.

    Both of a pair add the same two sums, and a + b is b + a to the bit.
    """

    def _sum(self, values: Tensor, transport: Transport) -> None:
        team, room = Team(transport), torch.empty_like(values)
        team.gather(values, room)
        for distance in _distances(team.size):
            team.swap(distance, values, room)
            if team.number is not None:
                values += room
        team.scatter(values)

    def path(self, size: int, num_ranks: int) -> list[int]:
        num_steps = len(_distances(team_size(num_ranks)))
        return team_path(size, num_ranks, [size] * num_steps)

    def values_sent(self, size: int, rank: int, num_ranks: int) -> int:
        members = team_size(num_ranks)
        by_member = [size * len(_distances(members))] * members
        return team_values_sent(size, rank, num_ranks, by_member)


def _distances(members: int) -> list[int]:
    return [1 << level for level in range(members.bit_length() - 1)]
