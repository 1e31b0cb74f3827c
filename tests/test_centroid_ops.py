"""Two centroids: the means of the halves of a row, and a bias that noise does not undo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import FLOAT_TYPES, NO_BAD_ROW, hard_rows
from torch import Tensor

from lightning_sylvie import ops


def decoded(rows: Tensor, index: Tensor | None = None, key: int = 0) -> tuple[Tensor, int]:
    count = len(rows) if index is None else len(index)
    width, bad = rows.size(1), torch.tensor([NO_BAD_ROW])
    message = torch.full((count, ops.minmax_row_bytes(width, 1) + 3), 0xAA, dtype=torch.uint8)
    ops.centroid_quantize_rows(rows, index, torch.arange(count), key, message, 3, bad)
    assert bool((message[:, :3] == 0xAA).all())
    result = rows.new_empty(count, width)
    ops.dequantize_rows(message, 3, 1, result)
    return result, int(bad)


def least_error(rows: Tensor) -> Tensor:
    """Squared error of the best two levels of each row: every cut of the sorted values is tried."""
    values = rows.double().sort(1).values
    count = torch.arange(1, values.size(1))
    total, energy = values.sum(1, keepdim=True), values.square().sum(1)
    below = values.cumsum(1)[:, :-1]
    kept = below.square() / count + (total - below).square() / (values.size(1) - count)
    return energy - kept.amax(1)


@pytest.mark.parametrize("kind", ["normal", "rectified", "sparse"])
def test_error_is_nearly_the_least(kind: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(300, 256)
    rows = {"rectified": rows.relu(), "sparse": rows * (torch.rand(300, 256) < 0.1)}.get(kind, rows)
    error = (decoded(rows)[0] - rows).square().sum(1)
    assert float(error.sum() / least_error(rows).sum()) < 1.03


def test_levels_are_the_means_of_both_halves() -> None:
    row = torch.tensor([1.0, 2.0, 3.0, 9.0, 10.0, 11.0]).repeat(6)[None]
    assert torch.equal(decoded(row)[0], torch.where(row > 6, 10.0, 2.0))


def test_noise_changes_nothing() -> None:
    rows = torch.randn(50, 40)
    assert torch.equal(decoded(rows, key=1)[0], decoded(rows, key=2)[0])


@settings(deadline=None, max_examples=40)
@given(data=st.data(), width=st.integers(0, 300))
def test_every_row_is_finite_or_reported(data: st.DataObject, width: int) -> None:
    """Rows of all sizes: an error below the row's, constants exact, the first bad row named."""
    rows = hard_rows(width, data.draw(st.sampled_from(FLOAT_TYPES)))
    rows = rows[~(rows.isfinite() & (rows.abs() > 1e37)).any(1)]  # levels may leave float32
    index = data.draw(st.sampled_from([None, torch.arange(60) % len(rows)]))
    found, bad = decoded(rows, index)
    given = rows if index is None else rows[index]
    if width < 32:  # min/max rows
        return
    is_good = given.isfinite().all(1)
    assert bad == (NO_BAD_ROW if bool(is_good.all()) else int((~is_good).nonzero()[0]))
    assert bool(found[~is_good].isnan().all())
    is_constant = is_good & (given == given[:, :1]).all(1)
    assert torch.equal(found[is_constant], given[is_constant])
    rest = is_good & ~is_constant & (given.float().abs().amax(1) > 1e-36)
    spread = (given[rest].double() - found[rest].double()).norm(dim=1)
    centred = given[rest].double() - given[rest].double().mean(1, keepdim=True)
    offset = 2**-6 * given[rest].double().norm(dim=1)  # of the levels, which bf16 rounds
    assert bool((spread <= centred.norm(dim=1) + offset).all())
