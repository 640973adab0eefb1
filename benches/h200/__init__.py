"""Programs that measure the `triton` backend on one H200, `python -m benches.h200.NAME`, and what they share.

| program | what it measures |
|---|---|
| `table` | unquantized layers beside their rooflines |
| `quant` | quantized layers beside their rooflines and the unquantized layer |
| `shapes` | other layers, tensor-parallel shards, skewed routing |
| `sweep` | how far a shape that was never tuned is from its own best |
| `full_size` | errors, replays and memory of every backend at full size |
| `training` | training steps beside grouped_mm under autograd, and the error of every gradient |
| `quack_backward` | QuACK's four products of a backward pass, each checked before it is timed |
| `sonic_moe` | training steps beside SonicMoE's, which has a process of its own |

`eplb` and `adapters` time nothing: they compare tokens of vLLM's engines, whose experts move or have adapters.
`build_flashinfer` measures nothing: it builds FlashInfer's kernels for the board.

What they share: `precompile` compiles kernels on all cores before anything is timed, `candidates` times launch
configurations beside each other, `quant_configs` lists those of quantized layers, and `leave_one_out` draws the
conclusions of a sweep and has the geometric mean. Other people's kernels are rows of `benches.board`, in one process
with ours.

Results are in `benches/results/`; `benches.report` makes the tables of the documents from them.
"""
