// Scales and zero points, decoded from what a checkpoint has.
#pragma once

#include "numbers.h"
#include "table.h"
#include "vectors.h"

namespace {

// kLanes scales of 8 bits.
MOEREG_INLINE Floats decode_e8m0(Bits codes) {
    // An exponent of 0 is a subnormal number, and one of 255 is NaN, which infinity times 0 is.
    const Floats value = as_floats(larger_signed32(left32<23>(codes), all_bits(0x00400000)));
    return multiply_add(value, zeros(), value);
}
MOEREG_INLINE Floats decode_e4m3(Bits codes) {
    const Bits magnitude = both(codes, all_bits(0x7f)), sign = left32<24>(both(codes, all_bits(0x80)));
    const Bits carry = signed_right32<31>(left32<24>(add32(magnitude, all_bits(1))));
    const Floats value = multiply(as_floats(left32<20>(magnitude)), all(0x1p120f));
    return as_floats(either(either(as_bits(value), sign), both(carry, all_bits(0x7fc00000))));
}

// Scales [begin, begin + count) of an array of any format, to whole registers. Not inline, since it is once per row.
__attribute__((noinline)) void decode_scales(
    const void* scales, int32_t format, int64_t begin, int64_t count, float* __restrict to) {
    if (format == MOEREG_CPU_F32) {
        memcpy(to, static_cast<const float*>(scales) + begin, static_cast<size_t>(count) * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < count; i += kLanes) {
        const uint8_t* from = static_cast<const uint8_t*>(scales) + begin + i;
        uint8_t codes[kLanes] = {};
        if (count - i < kLanes) from = static_cast<const uint8_t*>(memcpy(codes, from, static_cast<size_t>(count - i)));
        const Bits bits = load_bytes(from);
        const Floats values = format == MOEREG_CPU_E8M0 ? decode_e8m0(bits) : decode_e4m3(bits);
        memcpy(to + i, &values, sizeof values);
    }
}

__attribute__((noinline)) void find_zero_points(
    const moereg_cpu_matrix& matrix, int64_t row, int64_t groups, int64_t begin, int64_t count, float* to) {
    const uint8_t* packed = matrix.zero_point + row * ((groups + 1) / 2);
    for (int64_t i = 0; i < count; ++i) {
        to[i] = static_cast<float>(packed[(begin + i) / 2] >> 4 * ((begin + i) % 2) & 15);
    }
}

// What multiplies a whole row's sum: a scale per row or matrix, and the second scale.
MOEREG_INLINE float row_factor(const moereg_cpu_matrix& matrix, int64_t expert, int64_t row) {
    const bool is_second_half = 2 * row >= matrix.rows;
    float factor = 1.0f;
    if (matrix.group_columns == 0 && matrix.scale != nullptr) {
        const int64_t halves = matrix.scale_halves, half = halves == 2 && is_second_half;
        const int64_t place = matrix.group_rows == 1 ? expert * matrix.rows + row : expert * halves + half;
        float scales[kLanes];
        decode_scales(matrix.scale, matrix.scale_format, place, 1, scales);
        factor = scales[0];
    }
    if (matrix.scale_2 != nullptr) {
        const int64_t halves = matrix.scale_2_halves, half = halves == 2 && is_second_half;
        factor *= matrix.scale_2[expert * halves + half];
    }
    return factor;
}

// A row of scales of groups, of the array of all experts.
MOEREG_INLINE int64_t scale_row_of(const moereg_cpu_matrix& matrix, int64_t expert, int64_t row) {
    if (matrix.group_rows == 1) return expert * matrix.rows + row;
    // Gate's last block may be short, and up's first begins with up.
    const int64_t size = matrix.rows / matrix.scale_halves;
    const int64_t blocks = (size + matrix.group_rows - 1) / matrix.group_rows;
    return (expert * matrix.scale_halves + row / size) * blocks + row % size / matrix.group_rows;
}

}  // namespace
