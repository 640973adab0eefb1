"""One bound per scheme on ||out - reference|| / ||reference||, with its derivation.

The reference rounds inputs and intermediate as the scheme says and nothing else. So the bound covers a kernel's own
rounding: 16-bit roundings in between and, if activations are quantized, their effect on the quantizer.

**16-bit roundings.** A 16-bit backend rounds at most five times: gate, up, their product, a route's output of GEMM2,
and the sum. Rounding to nearest a value whose mantissa is spread over [1, 2) makes an error uniform in half a unit in
the last place, so a root mean square of ulp / sqrt(12) over a root mean square value of 1.53: 1.5e-3 for bfloat16 (ulp
2^-7), 1.8e-4 for float16 (ulp 2^-10). Independent roundings add in squares:

- bfloat16: sqrt(5) * 1.5e-3 = 3.3e-3, bound 8e-3. Activations stretch relative errors where their slope exceeds their
  value, and a call of one token averages over little: on an H200 3.8e-3 is usual, 6.1e-3 the largest seen.
- float16: sqrt(5) * 1.8e-4 = 4.1e-4, bound 1e-3 by the same factor; 4.8e-4 is usual.
- float32: sums of up to 16,384 products in any order, sqrt(16384) * 2^-24 = 8e-6, bound 1e-5.

A weight-only kernel may also round dequantized weights to 16 bits, once per matmul: sqrt(7) * 1.5e-3 = 4.0e-3, which
simulated kernels confirm. So its bounds are sqrt(7/5) times larger, 9.5e-3 and 1.2e-3. One that also rounds 32-bit
group scales to bfloat16 rounds gate, up and w2 twice: sqrt(5 + 6) * 1.5e-3 = 5.0e-3, inside the same bound. The Hopper
kernels for int4 do; an H200 measured 4.9e-3, and 2.9e-3 if scales multiply partial sums.

A gate's error in such a kernel depends on its weights' sums, not on the gate's size. If a clamp or soft cap at L is far
below the gates' spread of about 1 or more, the share L of gates that it does not clamp carries all of that error, and
the result is no larger than L: below L = 1 the bound is 1 / sqrt(L) times larger. In 400 simulated layers each with
spread 3.6, the largest error was 0.8 times the plain bound at L = 1, 1.1 at 0.5, 1.75 at 0.25 and 3.0 at 0.1.

**Few elements.** Over few elements the errors do not average out: the norm of n of them scatters by 1 / sqrt(2 n), and
one stretched element is a large part of it. Below 64 output elements the bound is 8 / sqrt(n) times larger, 2.7 times
for n = 9.

With a handful, the norm that errors are relative to may itself be small, because sums happen to cancel: it is below 1 /
c of its usual size with a probability of c^-n, or of c^(-n/2) if few of the tokens are large, so one layer in 10^4 is
c = 10^(8/n) times worse. The usual error is a third of the bound, so this exceeds 8 / sqrt(n) for n below 9 only.
The intermediate may have few elements as well, m = T * K * I. Then all products of a gate with its up may be small, or
all gates if the activation is steep, with a probability of c^-m. In weight-only kernels it is c^(-m/2), since their
errors do not shrink with a gate and half of the gates may count for nothing (relu2). So the bound is 10^(4/m) times
larger, in weight-only kernels 10^(8/m): 1.3 times at m = 64, 3.2 at 16, 10 at 8. In 4,000 simulated layers for each of
six activations, the largest error was, in units of the plain bound of a weight-only kernel, 1.2 at m = 65, 2.0 to 5.1
at 16, 2.3 to 33 at 8 (relu2 the worst; 99.9 % were within 7.0). For a kernel that is not weight-only it was 0.9, 0.6 to
3.6 and 0.7 to 2.8.

If this would exceed 0.5, the comparison is worth little and the bound is 0.5: a single element may be off by any
amount, and such layers need more tokens. Of 49,917 simulated layers of random sizes, T up to 17, H and I up to 65,
unquantized and weight-only in bfloat16 and float16, 28 exceed the bounds; 680 would exceed bounds of 8 / sqrt(n) alone.
Nearly all of the 28 have an H of 1 or an m of at most 4; the few others are off by up to 1.2 bounds.

**Quantized activations.** The input is given in 16 bits, so every kernel finds the same codes for it, except for exact
ties. The intermediate is not: if a kernel's value is off by d, an element near the border of two codes takes the other
one. With steps of size u that happens to a share E|d| / u of the elements and costs u each, a mean square of E|d| * u:
small errors grow to their geometric mean with the step. With d of relative root mean square e (mean 0.8 e):

- floats of m mantissa bits: u = 2^-m times the element's power of two, and over mantissas x spread over [1, 2) 0.8 e *
  E[x] * 2^-m / E[x^2] = 0.51 * 2^-m * e of the mean square: 0.064 e for e4m3, 0.26 e for e2m1;
- integers with one scale per token: u = amax / max code with amax about 6 times the root mean square r, and E|x| =
  0.6 r for the long-tailed product of gate and up: 0.8 * 0.6 * 6 / 127 e = 0.023 e for int8;
- group scales that are 8-bit floats themselves flip like e4m3 numbers, 9.6 e of them, and then a whole group is rounded
  anew, twice the element type's own noise of 2^-2m / 24: 0.8 * 2^-2m * e more, 0.20 e for nvfp4. Power-of-two scales
  move no mantissa, and fp32 scales only scale.

e is the kernel's rounding before the quantizer that the reference does not make: gate and up stored in 16 bits, and the
rounding in the scale, sqrt(3) * 1.5e-3 = 2.6e-3 in bfloat16. float32 sums are 1e-6 off. As a root mean square, flips
therefore cost 1.3e-2 (e4m3), 7.7e-3 (int8) and 3.5e-2 (nvfp4) in bfloat16, and the bound adds twice that. Simulated
kernels that store gate and up in bfloat16 show 1.2e-2 to 1.8e-2, 8e-3 and 2.4e-2 to 3.0e-2. Kernels that keep them in
registers and round where the reference does are within the 16-bit bound, apart from rare flips. A kernel that quantizes
the intermediate without rounding it to 16 bits first is off by about 1e-2 for e4m3.

If the weights are 4-bit integers with fp32 group scales (int4_w4a8_*), a kernel may round these to 16 bits too, once
per matmul: e is sqrt(4) * 1.5e-3 = 3.0e-3, and flips cost 1.4e-2. That is within twice 1.3e-2.

float16 flips an eighth as many elements, which would be a third of the error. But each of them costs the same, so at
test sizes a single large element may be all of it: float16 takes bfloat16's term.

In small layers one flip may be all of the error anyway: elements of 8 r are usual there, and change by a step of up to
2^-m of them as a float, and of 1 / max code as an integer. The bound adds that over the root of the number of elements,
of the output or of the intermediate, whichever has fewer.

**No bound is over 0.5**, since an output of zeros is off by 1. The sum would be for e2m1 below 90 elements, and come to
1.08 at 16; for e4m3 below 6. Right kernels do not need it: of 53,940 calls of simulated nvfp4 layers of 16 to 256
elements, with silu, relu2 and swigluoai, that store gate and up in bfloat16, the largest error was 0.33. With 8
elements 2 of 4,800 exceed 0.5, with 4 elements 1 of 2,510, with a single one (H or I is 1) 20 of 4,090; in 13,020 mxfp8
layers of 1 to 8 elements the largest error was 0.21. Drawn layers have 15 elements or more.

**Faster sigmoids.** The Hopper kernel for 8-bit codes with block scales computes sigmoids with `ex2.approx.ftz` and
`rcp.approx.ftz`, each off by at most 2^-22. The exponent is rounded twice before, as in other kernels, which costs
|g|*2^-23 of a gate g's exponential. That is 1e-6 for gates up to 4, as much as the float32 sums above, and 1e-5 at g
= -87, where the product is negligible; below that it is zero. So e stays 2.6e-3 and no bound changes. Infinite gates
and NaN give the same as a division: a gate of minus infinity is NaN. Nothing is clamped before encoding, since the
conversion saturates; NaN stays NaN.

Swapping gate and up, or missing a bias, a route or a group's own scale costs more than any of these bounds.
"""

from __future__ import annotations

import math
from typing import Final

from moereg.quantize import element_of
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantFormat, QuantScheme, get_scheme

FEW_ELEMENTS: Final = 64
"""From this many output elements on, the bound of 16-bit roundings is constant."""

LARGEST_BOUND: Final = 0.5
"""Largest bound from all sources together, since an output of zeros is off by 1."""

ROUNDING_BOUNDS: Final[dict[str, float]] = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}
"""Bounds by the problem's dtype, for unquantized weights and activations."""

# Relative errors of the intermediate before it is quantized.
_BEFORE_QUANTIZER: Final[dict[str, float]] = {"bfloat16": 2.6e-3, "float16": 2.6e-3, "float32": 1e-6}


def layer_tolerance(
    problem: MoEProblem,
    num_tokens: int,
    computes: QuantScheme | str | None = None,
    rounds_as_reference: bool = False,
) -> float:
    """The bound of one call of a layer.

    Args:
        problem: The layer.
        num_tokens: T.
        computes: The scheme that the kernel computes; the problem's if None, and of a problem with gradients always
            that of its weights with 16-bit activations.
        rounds_as_reference: See `tolerance`.

    Raises:
        UnknownSchemeError: No scheme has that name.
    """
    scheme, activation = problem.quant if computes is None else computes, problem.activation
    return tolerance(
        problem.quant.weight_only if problem.gradients else scheme,
        problem.dtype,
        num_tokens * problem.hidden_size,
        rounds_as_reference,
        num_intermediate=num_tokens * problem.top_k * problem.intermediate_size,
        limit=min(filter(None, (activation.limit, activation.gate_softcap, activation.up_softcap)), default=None),
    )


def tolerance(
    scheme: QuantScheme | str,
    dtype: str,
    num_elements: int | None = None,
    rounds_as_reference: bool = False,
    *,
    num_intermediate: int | None = None,
    limit: float | None = None,
) -> float:
    """The bound of a scheme for a problem's dtype; `layer_tolerance` takes the sizes from a problem.

    Args:
        scheme: The computed scheme: a name or a value.
        dtype: Dtype of the problem.
        num_elements: Elements of the compared output, T * H; many if None.
        rounds_as_reference: Whether the kernel keeps gate and up in fp32 and rounds the intermediate where the
            reference does, so that only the order of sums differs: a closer bound if activations are quantized, for
            tests of one kernel.
        num_intermediate: Elements of the intermediate, T * K * I; many if None.
        limit: The activation's clamp or soft cap, the lowest.

    Raises:
        UnknownSchemeError: No scheme has that name.
    """
    scheme = get_scheme(scheme)
    activation = scheme.activation
    is_weight_only = scheme.weight is not None and activation is None
    outputs, intermediate = (math.inf if count is None else max(count, 1) for count in (num_elements, num_intermediate))
    bound = ROUNDING_BOUNDS[dtype]
    if is_weight_only:
        bound *= math.sqrt(7 / 5) / math.sqrt(min(1.0 if limit is None else limit, 1.0))
    few_outputs = max(math.sqrt(FEW_ELEMENTS / min(outputs, FEW_ELEMENTS)), _one_in_10000(outputs / 2) / 3)
    bound *= max(few_outputs, _one_in_10000(intermediate / 2 if is_weight_only else intermediate))
    count = min(outputs, intermediate)
    if activation is not None:
        mean_square, largest = _flips(activation)
        before = _BEFORE_QUANTIZER["float32" if rounds_as_reference else dtype]
        bound += 2 * math.sqrt(mean_square * before) + largest / math.sqrt(count)
    return min(bound, LARGEST_BOUND)


def _one_in_10000(count: float) -> float:
    """The factor by which the norm of that many elements is too small in one layer of 10,000, at most 10^8."""
    return float(10.0 ** (4 / max(count, 0.5)))


def _flips(fmt: QuantFormat) -> tuple[float, float]:
    """Mean square of flips, relative to that of the elements and the error before, and the largest relative flip."""
    element = element_of(fmt)
    bits = element.mantissa_bits
    if bits is None:
        return 0.8 * 0.6 * 6 / element.max_value, 8 / element.max_value
    mean_square = 0.51 * 2.0**-bits
    if fmt.scale_dtype.startswith("float8") and fmt.scale_dtype != "float8_e8m0fnu":
        mean_square += 0.8 * 4.0**-bits
    return mean_square, 8 * 2.0**-bits
