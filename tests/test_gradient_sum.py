"""Whatever a training does with gradients, it does with overlapped sums of any algorithm too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from test_strategy import (
    clip_by_norm,
    lbfgs_with_line_search,
    manual_optimisation,
    rank_without_training_nodes,
    two_optimizers,
    unused_parameters,
)
from trainers import Case, OnRanks, Setting, alone, assert_equal_runs

from lightning_sylvie import SylvieStrategy
from lightning_sylvie.gradient import GradientSum


@dataclass(frozen=True)
class Under:
    """A case with gradients summed in some way."""

    case: Case
    way: GradientSum

    @property
    def __name__(self) -> str:
        return f"{self.case.__name__}_{self.way.all_reduce}"

    def __call__(self, setting: Setting) -> Any:
        setting.options = {"all_reduce": self.way}
        return self.case(setting)


CASES = {
    clip_by_norm: 1e-10,
    lbfgs_with_line_search: 1e-7,
    manual_optimisation: 1e-10,
    rank_without_training_nodes: 1e-10,
    two_optimizers: 1e-10,
    unused_parameters: 1e-10,
}
AUTO, RING = GradientSum(bucket_bytes=1), GradientSum("ring", bucket_bytes=300)
on_two = OnRanks(*(Under(case, AUTO) for case in CASES))
on_three = OnRanks(*(Under(case, RING) for case in CASES))


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_device(case: Case) -> None:
    expected = alone(case)
    assert_equal_runs(on_two(Under(case, AUTO), 2), expected, CASES[case])
    assert_equal_runs(on_three(Under(case, RING), 3), expected, CASES[case])


def test_the_strategy_takes_a_name_or_options() -> None:
    assert SylvieStrategy(all_reduce="ring").all_reduce == GradientSum("ring")
    assert SylvieStrategy(all_reduce=RING).all_reduce is RING
    with pytest.raises(ValueError, match=r"expected all_reduce in .*got 'star'"):
        SylvieStrategy(all_reduce="star")
