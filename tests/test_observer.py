"""What an observer hears of exchanges, against what the transport and the codes say."""

from __future__ import annotations

import pytest
import torch
from test_route import WIDTH, coded, cotangent, graph, shards

from lightning_sylvie.exchange import Halo
from lightning_sylvie.observer import Observer, Tallies
from lightning_sylvie.quantizer import choose
from lightning_sylvie.transport import Transport
from lightning_sylvie.transport.threads import run_threads


def observed(transport: Transport, observer: Observer) -> tuple[Halo, torch.Tensor]:
    """Two epochs of one exchange, forward and backward."""
    halo = Halo(transport, choose(1, "minmax"), choose(2), seed=5)
    halo.observer = observer
    shard = shards(3)[transport.rank]
    x = shard.node["x"].clone().requires_grad_()
    for epoch in (1, 2):
        with halo.using(shard, epoch=epoch):
            (extended,) = halo.append(x, name="convs.0")
            (extended * cotangent(shard)).sum().backward()
    return halo, extended.detach()


def test_bytes_and_errors_are_those_of_the_messages() -> None:
    def body(transport: Transport) -> None:
        tallies = Tallies(sample=10**6)
        observed(transport, tallies)
        assert list(tallies.by_layer) == [("convs.0", "forward"), ("convs.0", "backward")]
        forward, backward = tallies.by_layer.values()
        assert forward.num_messages == backward.num_messages == 2
        assert forward.num_bytes + backward.num_bytes == sum(transport.bytes_sent)
        shard = shards(3)[transport.rank]
        assert backward.num_bytes == 2 * shard.plan.num_halo * choose(2).row_bytes(cotangent(shard))
        for tally in (forward, backward):
            assert set(tally.seconds) == {"quantize", "exchange", "dequantize", "stall"}
            assert all(seconds > 0 for seconds in tally.seconds.values())

    run_threads(body, 3)


def test_the_error_is_that_of_the_rows_which_readers_get() -> None:
    def body(transport: Transport) -> float:
        tallies = Tallies(sample=10**6)
        observed(transport, tallies)
        tallies.clear()
        halo = Halo(transport, choose(1, "minmax"), seed=5)
        halo.observer, shard = tallies, shards(3)[transport.rank]
        with halo.using(shard, epoch=2):
            halo.append(shard.node["x"])
        return tallies.by_layer["exchange 1", "forward"].nmse

    found = run_threads(body, 3)
    x = graph().node["x"]
    for rank, shard in enumerate(shards(3)):
        nodes = shard.node_id[shard.plan.send_index]
        error = coded(choose(1, "minmax"), x[nodes], nodes, 0, shard) - x[nodes]
        expected = error.square().sum() / x[nodes].square().sum()
        assert found[rank] == pytest.approx(float(expected), rel=1e-5)


def test_a_sample_is_some_of_the_rows() -> None:
    """Half of the rows tell nearly what all of them do."""

    def body(transport: Transport) -> list[float]:
        found = []
        for sample in (8, 10**6):
            tallies = Tallies(sample)
            observed(transport, tallies)
            found.append(tallies.by_layer["convs.0", "forward"].nmse)
        return found

    for some, every in run_threads(body, 3):
        assert some != every
        assert some == pytest.approx(every, rel=0.5)


def test_listening_changes_nothing() -> None:
    """And rows that travel as they are lose nothing; they are not sampled from integers."""

    def body(transport: Transport) -> None:
        heard, unheard = (observed(transport, o)[1] for o in (Tallies(), Observer()))
        assert torch.equal(heard, unheard)
        halo, shard = Halo(transport), shards(3)[transport.rank]
        halo.observer = tallies = Tallies()
        with halo.using(shard):
            halo.append(shard.node["x"], shard.node_id[:, None].expand(-1, WIDTH))
        (tally,) = tallies.by_layer.values()
        assert tally.nmse == 0
        assert tally.energy > 0

    run_threads(body, 3)
