"""Rabenseifner's all-reduce: recursive halving, then recursive doubling."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_sylvie.all_reduce.algorithm import AllReduce, bounds, largest
from lightning_sylvie.all_reduce.team import Team, team_path, team_size, team_values_sent
from lightning_sylvie.transport import Transport


@final
class Rabenseifner(AllReduce):
    """Moves 2(N-1)/N of the data as a ring does, in 2 log2 N steps instead of 2(N-1).

    The data is cut into as many blocks as there are members of the team. Halving: at distance
    N/2, N/4, …, 1 a pair shares out the blocks that both hold; each sends the other's half, and
    adds what it receives to its own. Then member m alone has the sum of block m. Doubling: at
    distance 1, 2, … a pair swaps all complete blocks.
    """

    def _sum(self, values: Tensor, transport: Transport) -> None:
        team, room = Team(transport), torch.empty_like(values)
        team.gather(values, room)
        ends = bounds(len(values), team.size)
        for distance in reversed(_distances(team.size)):
            kept, given = _halves(values, ends, team.number or 0, distance)
            team.swap(distance, given, room[: len(kept)])
            if team.number is not None:
                kept += room[: len(kept)]
        for distance in _distances(team.size):
            own, other = _halves(values, ends, team.number or 0, distance)
            team.swap(distance, own, other)
        team.scatter(values)

    def path(self, size: int, num_ranks: int) -> list[int]:
        members = team_size(num_ranks)
        halving = [largest(size, members) * distance for distance in _distances(members)]
        return team_path(size, num_ranks, [*reversed(halving), *halving])

    def values_sent(self, size: int, rank: int, num_ranks: int) -> int:
        members = team_size(num_ranks)
        ends = bounds(size, members)
        # Halving sends what the other keeps, doubling what is its own.
        by_member = [
            sum(
                ends[end] - ends[start]
                for distance in _distances(members)
                for start, end in _ranges(number, distance)
            )
            for number in range(members)
        ]
        return team_values_sent(size, rank, num_ranks, by_member)


def _distances(members: int) -> list[int]:
    return [1 << level for level in range(members.bit_length() - 1)]


def _ranges(number: int, distance: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Blocks that this member keeps, and those that the one at this distance does."""
    own = number & -distance
    other = own ^ distance
    return (own, own + distance), (other, other + distance)


def _halves(values: Tensor, ends: list[int], number: int, distance: int) -> tuple[Tensor, Tensor]:
    own, other = _ranges(number, distance)
    return values[ends[own[0]] : ends[own[1]]], values[ends[other[0]] : ends[other[1]]]
