"""A power of two of the ranks, for algorithms that pair them."""

from __future__ import annotations

from torch import Tensor

from lightning_sylvie.transport import Transport


def team_size(num_ranks: int) -> int:
    """The largest power of two that is not above the number of ranks."""
    return 1 << (num_ranks.bit_length() - 1)


class Team:
    """The largest power of two of the ranks; each rank beyond it gives its data to a member.

    Of the first ``2 * (num_ranks - size)`` ranks the odd ones are members for themselves and for
    the even rank before them. Members are numbered from 0.

    Attributes:
        size: Members.
        number: This rank's among them; None: it is no member.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.size = team_size(transport.num_ranks)
        self._extra = transport.num_ranks - self.size
        rank = transport.rank
        self._paired = rank < 2 * self._extra
        if self._paired:
            self.number = rank // 2 if rank % 2 else None
        else:
            self.number = rank - self._extra

    def gather(self, values: Tensor, room: Tensor) -> None:
        """Adds the data of the ranks beyond the team to that of members: one step, if any are."""
        if not self._extra:
            return
        adds = self._paired and self.number is not None
        gives = self._paired and self.number is None
        self._with_partner(values if gives else values[:0], room if adds else room[:0])
        if adds:
            values += room

    def scatter(self, values: Tensor) -> None:
        """Gives the ranks beyond the team the sum."""
        if self._extra:
            gives = self._paired and self.number is not None
            takes = self._paired and self.number is None
            self._with_partner(values if gives else values[:0], values if takes else values[:0])

    def swap(self, distance: int, outgoing: Tensor, incoming: Tensor) -> None:
        """One step: with the member whose number differs by the bit `distance`."""
        if self.number is None:
            self._move(outgoing[:0], incoming[:0], self._transport.rank)
            return
        other = self.number ^ distance
        peer = 2 * other + 1 if other < self._extra else other + self._extra
        self._move(outgoing, incoming, peer)

    def _with_partner(self, outgoing: Tensor, incoming: Tensor) -> None:
        rank = self._transport.rank
        self._move(outgoing, incoming, rank ^ 1 if self._paired else rank)

    def _move(self, outgoing: Tensor, incoming: Tensor, peer: int) -> None:
        self._transport.send_receive(outgoing, peer, incoming, peer).wait()


def team_path(size: int, num_ranks: int, among_members: list[int]) -> list[int]:
    """The path of an algorithm on a team, given that among its members."""
    if num_ranks == team_size(num_ranks):
        return among_members
    return [size, *among_members, size]


def team_values_sent(size: int, rank: int, num_ranks: int, by_member: list[int]) -> int:
    """Values that a rank sends, given what each member sends to members."""
    extra = num_ranks - team_size(num_ranks)
    if rank >= 2 * extra:
        return by_member[rank - extra]
    return size + (by_member[rank // 2] if rank % 2 else 0)
