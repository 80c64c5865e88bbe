"""An operator on one rank's tokens, as context parallelism calls it: on the kernels or in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warploom.runtime.autocast import disable_autocast
from warploom.runtime.dispatch import CustomOperator

Tensor = torch.Tensor


class PlainOperator(NamedTuple):
    """An operator whose results are outputs and last states."""

    operator: CustomOperator  # on the kernels
    reference: Callable[[Any, int, Any], Any]  # given inputs, offset and options
    differentiable: int  # the first inputs

    def run(self, inputs: Any, offset: int, options: Any, kernels: bool) -> tuple[Tensor, Tensor | None]:
        """Returns outputs, and the last states where the options want them."""
        if kernels:
            operator = self.operator
            out, state = operator.op_without_autograd(*operator.join_arguments(inputs, offset, options))
            return out, state if options.return_state else None
        with disable_autocast(inputs[0]):
            found = self.reference(inputs, offset, options)
        return found if options.return_state else (found, None)

    def differentiate(
        self, grad: Tensor | None, grad_state: Tensor | None, inputs: Any, offset: int, options: Any, kernels: bool,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """Returns the gradients of the first inputs, of those that are wanted and there.

        Args:
            grad: That of the outputs.
            grad_state: That of the last states.
            inputs: The call's tensors.
            offset: Its offset.
            options: Its options; states are returned where they have a gradient.
            kernels: Whether it runs on the kernels.
            wanted: Which gradients are.
        """
        wanted = [wants and x is not None for wants, x in zip(wanted, inputs)]
        options = options._replace(return_state=grad_state is not None)
        if kernels:
            backward: Any = self.operator.backward_operator
            given = (grad, grad_state, *inputs)
            found = backward.op(*backward.join_arguments(given, offset, (*options, wanted)))
            return [gradient if wants else None for gradient, wants in zip(found, wanted)]
        first = self.differentiable
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in inputs[:first]]
            out, state = self.run(type(inputs)(*leaves, *inputs[first:]), offset, options, kernels)
            pairs = [(x, g) for x, g in ((out, grad), (state, grad_state)) if x is not None and g is not None]
            results, given = zip(*pairs) if pairs else ((out,), (torch.zeros_like(out),))
            chosen = [leaf for leaf, wants in zip(leaves, wanted) if wants and leaf is not None]
            each = iter(torch.autograd.grad(results, chosen, given, allow_unused=True, materialize_grads=True))
        return [next(each) if wants else None for wants in wanted]
