"""The MoE kernels of vLLM as backends of moereg, one module each.

Registering and deciding import no vllm. Its kernels are called by the functions that vLLM's own layers call. These are
no stable interface, so each backend asks for the versions of vllm that it was written for.
"""

from __future__ import annotations

__all__: list[str] = []
