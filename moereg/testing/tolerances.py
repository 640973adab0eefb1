"""One bound a scheme on ||out - reference|| / ||reference||, with its derivation.

The reference rounds nothing but the inputs, so the bound is what a kernel's own rounding may cost. A 16-bit backend
rounds at most five times on the way: gate, up, their product, the output of GEMM2 of a route, and the sum. Rounding to
nearest a value whose mantissa is spread over [1, 2) costs an error uniform in half a unit in the last place, so a root
mean square of ulp / sqrt(12) over a root mean square value of 1.53: 1.5e-3 for bfloat16 (ulp 2^-7), 1.8e-4 for float16
(ulp 2^-10). Independent roundings add in squares:

- bfloat16: sqrt(5) * 1.5e-3 = 3.3e-3, bound 8e-3. Activations stretch relative errors where their slope exceeds their
  value, and a call of one token averages over little: on an H200 3.8e-3 is usual, 6.1e-3 the largest seen.
- float16: sqrt(5) * 1.8e-4 = 4.1e-4, bound 1e-3 by the same factor; 4.8e-4 is usual.
- float32: sums of up to 16,384 products in any order, sqrt(16384) * 2^-24 = 8e-6, bound 1e-5.

Over few elements the errors do not average out: the norm of n of them scatters by 1 / sqrt(2 n), and one stretched
element is a large part of it. Below 64 elements the bound is 8 / sqrt(n) times larger, 2.8 times for n = 8, where the
largest of 1,726 random tiny layers was 1.8 times the bound.

A swapped gate and up, a dropped bias or a missed route costs 0.1 and more, so nothing of that passes.
"""

from __future__ import annotations

import math
from typing import Final

from moereg.errors import UnknownSchemeError, unknown_name_message

__all__ = ["TOLERANCES", "tolerance"]

FEW_ELEMENTS: Final = 64
"""From here on the size of an output does not matter to its bound."""

TOLERANCES: Final[dict[str, dict[str, float]]] = {
    "unquantized": {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5},
}


def tolerance(scheme: str, dtype: str, num_elements: int = FEW_ELEMENTS) -> float:
    """The bound of a scheme for a problem's dtype.

    Args:
        scheme: Name of what is computed.
        dtype: Of the problem.
        num_elements: Of the output that is compared, T * H.

    Raises:
        UnknownSchemeError: The scheme has no bound yet, so nothing may claim it.
    """
    if scheme not in TOLERANCES:
        raise UnknownSchemeError(unknown_name_message("scheme with a tolerance", scheme, TOLERANCES))
    return TOLERANCES[scheme][dtype] * math.sqrt(FEW_ELEMENTS / min(max(num_elements, 1), FEW_ELEMENTS))
