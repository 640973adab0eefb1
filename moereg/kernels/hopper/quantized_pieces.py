"""Products of 8-bit codes with block scales in which sums are added up while the tensor cores work, in Triton's Gluon.

A warpgroup's 64 rows by 256 columns go through the tensor cores in four pieces of 64 columns. Two pieces are under way
at a time: while one is multiplied, the other is scaled and added to the sums. Registers have room for this, since two
pieces are as large as one half. Rows are wgmma's operand from registers, read once a step; from shared memory they
would be read once a piece.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moereg.kernels.hopper.quantized_ring import BLOCK_K, COLUMNS, OWN_ROWS
from moereg.kernels.hopper.ring import next_slot, reinterpret

# Columns of a piece.
_PIECE = gl.constexpr(64)


@gluon.jit
def _load_scalar(shared):
    """The only element of a tensor in shared memory."""
    return gl.sum(shared.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _start(rows, ring, piece, product):
    """Starts codes times codes of one step and piece, over whatever `product` [OWN_ROWS, _PIECE] holds."""
    STAGES: gl.constexpr = ring.weights.shape[0] // 2
    pieces = reinterpret(ring.weights, ring.weights.dtype, [4 * STAGES, _PIECE, BLOCK_K], ring.weights.layout)
    return warpgroup_mma(rows, pieces.index(piece).permute((1, 0)), product, use_acc=False, is_async=True)


@gluon.jit
def _join(first, second, LAYOUT: gl.constexpr):
    """Two pieces [OWN_ROWS, _PIECE] side by side as a half [OWN_ROWS, COLUMNS]; only names registers."""
    both = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (OWN_ROWS, COLUMNS))
    return gl.convert_layout(both, LAYOUT)


@gluon.jit
def multiply_pieces(
    ring,
    slot,
    phase,
    num_steps,
    lead,
    weight,
    WARPGROUP: gl.constexpr,
    STAGES: gl.constexpr,
    LEADS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Multiplies and scales both halves of a warpgroup's rows, out of the next `num_steps` slots of the ring.

    Waits for each slot to be full and arrives at its `empty` once its products have ended. Tensor cores keep
    about 14 bits of a sum of 8-bit floats, so each step's product is added up outside of them.

    Args:
        ring: a `CodeRing` as its consumers read it.
        slot: the first slot.
        phase: the round it is in.
        num_steps: steps along the reduced dimension, at least one.
        lead: [1, 1] barrier at which the first warpgroup arrives after one step of each tile; any where not LEADS.
        weight: [OWN_ROWS] fp32 that multiplies the scales of rows, or None. A multiplication of the results would spill
            136 bytes a thread.
        WARPGROUP: which rows.
        STAGES: slots of the ring.
        LEADS: whether the first warpgroup is a step ahead.
        LAYOUT: of the results.

    Returns:
        [OWN_ROWS, COLUMNS] fp32 of either half; the next slot and its phase.
    """
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PIECE, 32])
    low0 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    low1 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    high0 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    high1 = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    first = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    second = gl.zeros([OWN_ROWS, _PIECE], gl.float32, PART)
    late_scale = gl.zeros([OWN_ROWS], gl.float32, gl.SliceLayout(1, PART))
    gl.assume(num_steps > 0)
    for k in range(num_steps):
        mbarrier.wait(ring.full.index(slot), phase)
        own_rows = ring.rows.index(2 * slot + WARPGROUP)  # [OWN_ROWS, BLOCK_K]
        own_rows = own_rows.load(gl.DotOperandLayout(0, PART, 4))
        row_scale = ring.row_scales.index(2 * slot + WARPGROUP).load(gl.SliceLayout(1, PART))  # [OWN_ROWS]
        if weight is not None:
            row_scale *= gl.convert_layout(weight, gl.SliceLayout(1, PART))
        low_scale = row_scale * _load_scalar(ring.half_scales.index(2 * slot))
        high_scale = row_scale * _load_scalar(ring.half_scales.index(2 * slot + 1))
        first = _start(own_rows, ring, 4 * slot, first)
        # The last step's last piece. Added up at that step's end, it would not fit into registers.
        high1 += second * late_scale[:, None]
        second = _start(own_rows, ring, 4 * slot + 1, second)
        first = warpgroup_mma_wait(1, deps=(first,))
        low0 += first * low_scale[:, None]
        first = _start(own_rows, ring, 4 * slot + 2, first)
        second = warpgroup_mma_wait(1, deps=(second,))
        low1 += second * low_scale[:, None]
        second = _start(own_rows, ring, 4 * slot + 3, second)
        first = warpgroup_mma_wait(1, deps=(first,))
        high0 += first * high_scale[:, None]
        second = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(ring.empty.index(slot))
        if LEADS:
            if WARPGROUP == 0:
                mbarrier.arrive(lead.index(0), pred=k == 0)
        late_scale = high_scale
        slot, phase = next_slot(slot, phase, STAGES)
    high1 += second * late_scale[:, None]
    return _join(low0, low1, LAYOUT), _join(high0, high1, LAYOUT), slot, phase
