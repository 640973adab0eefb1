"""What `jax` of moereg-jax calls."""

from __future__ import annotations

from tests.peers.contract import ForeignCall

CALLS = (
    ForeignCall(
        "jax.Array",
        "",
        package="jax",
        backends=("jax",),
    ),
    ForeignCall(
        "jax.dlpack.from_dlpack",
        "(external_array, device=None, copy=None)",
        package="jax",
        backends=("jax",),
    ),
    ForeignCall(
        "jax.jit",
        "(fun=NotSpecified, /, *, in_shardings=UnspecifiedValue, out_shardings=UnspecifiedValue, "
        "static_argnums=None, static_argnames=None, donate_argnums=None, donate_argnames=None, "
        "keep_unused=False, device=None, backend=None, inline=False, compiler_options=None)",
        package="jax",
        backends=("jax",),
    ),
    ForeignCall(
        "jax.lax.Precision",
        "(DEFAULT=0, HIGH=1, HIGHEST=2)",
        package="jax",
        backends=("jax",),
    ),
    ForeignCall(
        "jax.lax.ragged_dot",
        "(lhs, rhs, group_sizes, precision=None, preferred_element_type=None, group_offset=None, out_sharding=None)",
        package="jax",
        backends=("jax",),
    ),
    ForeignCall(
        "jax.nn.gelu",
        "(x, approximate=True)",
        package="jax",
        backends=("jax",),
    ),
    ForeignCall(
        "jax.nn.sigmoid",
        "(x)",
        package="jax",
        backends=("jax",),
    ),
    ForeignCall(
        "jax.numpy",
        "",
        package="jax",
        backends=("jax",),
    ),
)
