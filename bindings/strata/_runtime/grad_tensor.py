"""What `p.grad` of a wrapped parameter is: a tensor without memory, which answers.

    p.grad.norm()           # from the sum of squares that was taken while the gradient landed
    p.grad.mul_(0.5)        # noted, and done by the update
    p.grad.abs().max()      # of the true values, read for this
    p.grad[0] = 0           # the true values are read, changed and written back

What is answered without the values is in the table of grad_answers.py; stand_in.py does the rest.
Where a view of the values lives on, the gradient is held there: gradients.py,
Note [Where a gradient is].
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from .grad_answers import ANSWERED
from .grad_shown import Shown
from .stand_in import RAW, StandIn, make
from .tensor_functions import functions

if TYPE_CHECKING:
    from .gradients import Gradients


def tensor_of(shown: Shown) -> PagedGradient:
    """What p.grad is: the same object for as long as somebody has it."""
    known = shown.tensor() if shown.tensor is not None else None
    if known is None:
        known = make(PagedGradient, shown)
        shown.tensor = weakref.ref(known)
    return cast(PagedGradient, known)


class PagedGradient(StandIn):
    """The gradient of a wrapped parameter: its shape, dtype and device, and no memory."""

    _strata_values: Shown
    what = (
        "a gradient that rests in strata's pages, which have no address of their own: use "
        "p.grad.clone()"
    )
    answered = ANSWERED
    refused = RAW | functions("data_ptr untyped_storage storage _typed_storage")

    def shows(self, gradients: Gradients, index: int) -> bool:
        """Whether it is the gradient that this parameter has."""
        shown = self._strata_values
        return shown.gradients is gradients and shown.index == index and not shown.left
