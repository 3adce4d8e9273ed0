"""Measured step time against the lower bound, in the settings of the bench `plan-error`."""

from collections.abc import Iterator

from .common import Context, Figure
from .plan_error import BOUND_MIN, outcomes


def run(context: Context) -> Iterator[Figure]:
    """Yields the share of the bound that each setting reaches."""
    for name, outcome in outcomes(context).items():
        yield Figure(
            "bound",
            f"{name}_of_{outcome.what}",
            outcome.share,
            "share",
            BOUND_MIN[outcome.what],
            1.0,
            "higher",
        )
