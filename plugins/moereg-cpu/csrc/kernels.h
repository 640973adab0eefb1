// Products of a few packed rows with rows of weights, which are read once, in canonical order, and decoded in
// registers. A translation unit includes this once, with the compiler options of its instruction set.
//
// A register of the decoded weights holds every V-th column of a step of V registers, since taking a byte apart by
// shifts and masks leaves its parts there; shuffles would cost more. Packing gives the activations the same order.
//
// 16- and 32-bit weights and 8-bit floats are multiplied as fp32. Integers and 4-bit floats, whose doubles are
// integers, are multiplied as 16-bit integers, with exact sums: per block of 128 columns, activations are integers
// times one fp32 number, off by at most 2^-16 of the block's largest. That is below the rounding of bfloat16 and
// float16 inputs, and twice as fast as fp32 where a byte holds two weights.
#pragma once

#include "numbers.h"
#include "table.h"
#include "vectors.h"

namespace {

using moereg_cpu::Table;

// Blocks of columns whose scales are decoded at a time.
constexpr int kSegment = 16;
constexpr int kLeastGroup = 16;
constexpr int kGroupRows = 4;

// --- formats: how a step of weights becomes registers ---

struct Float32 {
    static constexpr bool kIsInteger = false, kHasNan = false;
    static constexpr int kVectors = 1, kStep = kLanes, kStepBytes = 4 * kStep;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Floats* to) { to[0] = as_floats(load_bits(from)); }
};

struct Float16 {
    static constexpr bool kIsInteger = false, kHasNan = false;
    static constexpr int kVectors = 1, kStep = kLanes, kStepBytes = 2 * kStep;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Floats* to) { to[0] = load_halves(from); }
};

struct BFloat16 {
    static constexpr bool kIsInteger = false, kHasNan = false;
    static constexpr int kVectors = 2, kStep = 2 * kLanes, kStepBytes = kBytes;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Floats* to) {
        const Bits bits = load_bits(from);
        to[0] = as_floats(left32<16>(bits));
        to[1] = as_floats(both(bits, all_bits(0xffff0000)));
    }
};

// A code's sign, exponent and mantissa where fp32 has them is 2^-120 of its value, also if the code is subnormal. Half
// of that factor is in the packed activations, and half in the result, so that neither leaves the range of fp32.
struct Float8 {
    static constexpr bool kIsInteger = false, kHasNan = true;
    static constexpr int kVectors = 4, kStep = 4 * kLanes, kStepBytes = kStep;
    static constexpr float kFactor = 0x1p60f, kResult = 0x1p60f;
    MOEREG_INLINE void decode(const uint8_t* from, Floats* to) {
        const Bits bits = load_bits(from), mask = all_bits(0x87f00000);
        to[0] = as_floats(both(signed_right32<4>(left32<24>(bits)), mask));
        to[1] = as_floats(both(signed_right32<4>(left32<16>(bits)), mask));
        to[2] = as_floats(both(signed_right32<4>(left32<8>(bits)), mask));
        to[3] = as_floats(both(signed_right32<4>(bits), mask));
    }
};

struct Int8 {
    static constexpr bool kIsInteger = true, kHasNan = false, kHasOffset = false;
    static constexpr int kVectors = 2, kStep = 2 * kShorts, kStepBytes = kStep;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Bits* to) {
        const Bits bits = load_bits(from);
        to[0] = signed_right16<8>(left16<8>(bits));
        to[1] = signed_right16<8>(bits);
    }
};

// Codes stay unsigned; what a code of zero point z means for a sum is z times the sum of the activations, which packing
// finds once.
struct UInt4 {
    static constexpr bool kIsInteger = true, kHasNan = false, kHasOffset = true;
    static constexpr int kVectors = 4, kStep = 4 * kShorts, kStepBytes = kStep / 2;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Bits* to) {
        const Bits bits = load_bits(from), mask = all_bits(0x000f000f);
        to[0] = both(bits, mask);
        to[1] = both(right16<4>(bits), mask);
        to[2] = both(right16<8>(bits), mask);
        to[3] = right16<12>(bits);
    }
};

// Twice the value of each code; packing halves the activations' factor.
struct Float4 {
    static constexpr bool kIsInteger = true, kHasNan = false, kHasOffset = false;
    static constexpr int kVectors = 4, kStep = 4 * kShorts, kStepBytes = kStep / 2;
    static constexpr float kFactor = 0.5f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Bits* to) {
        static constexpr uint8_t kDoubles[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
        const Bits bits = load_bits(from), mask = all_bits(0x0f0f0f0f);
        const Bits low = look_up(kDoubles, both(bits, mask)), high = look_up(kDoubles, both(right16<4>(bits), mask));
        to[0] = signed_right16<8>(left16<8>(low));
        to[1] = signed_right16<8>(left16<8>(high));
        to[2] = signed_right16<8>(low);
        to[3] = signed_right16<8>(high);
    }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16 are multiplied as they are; activations are rounded to bfloat16.
struct BFloat16Pairs {
    static constexpr bool kIsInteger = false, kHasNan = false;
    static constexpr int kVectors = 1, kStep = 2 * kLanes, kStepBytes = kBytes;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Bits* to) { to[0] = load_bits(from); }
};
using BFloat16Weights = BFloat16Pairs;
MOEREG_INLINE Floats multiply_packed(Floats sum, Bits weights, const uint8_t* packed) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)load_bits(packed));
}
#else
using BFloat16Weights = BFloat16;
#endif

MOEREG_INLINE Floats multiply_packed(Floats sum, Floats weights, const uint8_t* packed) {
    return multiply_add(weights, as_floats(load_bits(packed)), sum);
}

template <class Format> struct VectorOf { using type = Floats; };
#ifdef __AVX512BF16__
template <> struct VectorOf<BFloat16Pairs> { using type = Bits; };
#endif

// --- packed rows ---

template <class Format> constexpr int kSteps = kBlock / Format::kStep;
template <class Format> constexpr int kBlockWeightBytes = kSteps<Format> * Format::kStepBytes;

// A block of packed activations: its numbers, for integers also sums for zero points and the fp32 factor.
template <class Format> constexpr int kNumberBytes = kSteps<Format> * Format::kVectors * kBytes;
template <class Format> constexpr int kSumBytes = kSteps<Format> * kBytes;
template <class Format> constexpr int packed_bytes() {
    if constexpr (!Format::kIsInteger) {
        return kNumberBytes<Format>;
    } else {
        return kNumberBytes<Format> + (Format::kHasOffset ? kSumBytes<Format> : 0) + 64;
    }
}
template <class Format> constexpr int kFactorPlace = packed_bytes<Format>() - 64;

template <class Format> void pack_block(const float* numbers, uint8_t* to) {
    constexpr int vectors = Format::kVectors;
    if constexpr (Format::kIsInteger) {
        uint32_t largest = 0;
        for (int i = 0; i < kBlock; ++i) {
            const uint32_t magnitude = bits_of(numbers[i]) & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        // A number that is not finite makes all of its row NaN. Tiny ones would overflow the quotient.
        const bool is_finite = largest < 0x7f800000, is_tiny = largest < bits_of(0x1p-110f);
        const float multiplier = is_finite && !is_tiny ? 32767.0f / float_of(largest) : 0.0f;
        const float step = is_finite ? (is_tiny ? 0.0f : float_of(largest) / 32767.0f) : __builtin_nanf("");
        const float factor = step * Format::kFactor;
        memcpy(to + kFactorPlace<Format>, &factor, sizeof factor);
        int32_t codes[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            codes[i] = static_cast<int32_t>(bits_of(numbers[i] * multiplier + 12582912.0f) - 0x4b400000);
        }
        if (multiplier == 0) memset(codes, 0, sizeof codes);
        int16_t* packed = reinterpret_cast<int16_t*>(to);
        for (int step_place = 0; step_place < kBlock; step_place += Format::kStep) {
            for (int v = 0; v < vectors; ++v) {
                for (int lane = 0; lane < kShorts; ++lane) {
                    *packed++ = static_cast<int16_t>(codes[step_place + lane * vectors + v]);
                }
            }
        }
        if constexpr (Format::kHasOffset) {
            int32_t* sums = reinterpret_cast<int32_t*>(to + kNumberBytes<Format>);
            constexpr int span = Format::kStep / kLanes;
            for (int first = 0; first < kBlock; first += span) {
                int32_t sum = 0;
                for (int i = 0; i < span; ++i) sum += codes[first + i];
                *sums++ = sum;
            }
        }
#ifdef __AVX512BF16__
    } else if constexpr (Format::kStep == 2 * kLanes && Format::kVectors == 1) {
        uint16_t* packed = reinterpret_cast<uint16_t*>(to);
        for (int i = 0; i < kBlock; ++i) packed[i] = bfloat16_of(numbers[i]);
#endif
    } else {
        float* packed = reinterpret_cast<float*>(to);
        for (int step_place = 0; step_place < kBlock; step_place += Format::kStep) {
            for (int v = 0; v < vectors; ++v) {
                for (int lane = 0; lane < kLanes; ++lane) {
                    *packed++ = numbers[step_place + lane * vectors + v] * Format::kFactor;
                }
            }
        }
    }
}

template <class Format>
void pack_row(const moereg_cpu_matrix& matrix, const void* row, int32_t format, float factor, void* packed) {
    float numbers[kBlock];
    uint8_t* to = static_cast<uint8_t*>(packed);
    for (int64_t begin = 0; begin < matrix.columns; begin += kBlock) {
        const int64_t count = smaller(kBlock, matrix.columns - begin);
        if (count == kBlock) {
            widen(row, format, begin, kBlock, factor, numbers);
        } else {
            memset(numbers, 0, sizeof numbers);
            widen(row, format, begin, count, factor, numbers);
        }
        pack_block<Format>(numbers, to);
        to += packed_bytes<Format>();
    }
}

// --- scales ---

// The scales of groups [begin, begin + count) of a row of weights: where they lie, or decoded into a buffer.
MOEREG_INLINE const float* find_scales(
    const moereg_cpu_matrix& matrix, int64_t scale_row, int64_t groups, int64_t begin, int64_t count, bool copies,
    float* buffer) {
    const int64_t place = scale_row * groups + begin;
    if (matrix.scale_format == MOEREG_CPU_F32) {
        const float* scales = static_cast<const float*>(matrix.scale) + place;
        if (!copies) return scales;
        memcpy(buffer, scales, static_cast<size_t>(count) * sizeof *scales);
        return buffer;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(matrix.scale) + place;
    if (matrix.scale_format == MOEREG_CPU_E8M0) {
        for (int64_t i = 0; i < count; ++i) buffer[i] = float_of_e8m0(codes[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) buffer[i] = float_of_e4m3(codes[i]);
    }
    return buffer;
}

MOEREG_INLINE void find_zero_points(
    const moereg_cpu_matrix& matrix, int64_t row, int64_t groups, int64_t begin, int64_t count, uint32_t* to) {
    const uint8_t* packed = matrix.zero_point + row * ((groups + 1) / 2);
    for (int64_t i = 0; i < count; ++i) to[i] = packed[(begin + i) / 2] >> 4 * ((begin + i) % 2) & 15;
}

// What multiplies a whole row's sum: a scale per row or matrix, and the second scale.
MOEREG_INLINE float row_factor(const moereg_cpu_matrix& matrix, int64_t expert, int64_t row) {
    float factor = 1.0f;
    if (matrix.scale != nullptr && matrix.group_columns == 0) {
        const int64_t halves = matrix.scale_halves, half = row * halves / matrix.rows;
        const int64_t place = matrix.group_rows == 1 ? expert * matrix.rows + row : expert * halves + half;
        if (matrix.scale_format == MOEREG_CPU_F32) {
            factor = static_cast<const float*>(matrix.scale)[place];
        } else {
            const uint8_t code = static_cast<const uint8_t*>(matrix.scale)[place];
            factor = matrix.scale_format == MOEREG_CPU_E8M0 ? float_of_e8m0(code) : float_of_e4m3(code);
        }
    }
    if (matrix.scale_2 != nullptr) {
        const int64_t halves = matrix.scale_2_halves;
        factor *= matrix.scale_2[expert * halves + row * halves / matrix.rows];
    }
    return factor;
}

// --- products ---

// How many rows of weights are read side by side for M packed rows: enough sums to hide an instruction's latency, and
// no more than there are registers for.
template <class Format, int M> constexpr int rows_at_once() {
    if (Format::kIsInteger) return kLanes == 16 ? (M <= 2 ? 4 : 2) : (M <= 2 ? 2 : 1);
    return kLanes == 16 || M <= 2 ? 4 : 2;
}

// Adds the products of one block of columns. NaN codes are looked for in `seen`.
template <class Format, int G, bool Z, int M, int N>
MOEREG_INLINE void add_block(
    const uint8_t* const* weights, const uint8_t* const* packed, const float* const* scales,
    const uint32_t* const* zero_points, Floats (*sums)[N], Bits* seen) {
    constexpr int vectors = Format::kVectors;
    // Lanes that share a scale in a step, and groups of a step; of whole blocks there is one scale.
    constexpr bool is_split = G != 0 && G < kBlock;
    constexpr int span = Format::kStep / kLanes, lanes = is_split ? G / span : kLanes;
    constexpr int groups = is_split ? Format::kStep / G : 0;
    if constexpr (Format::kIsInteger) {
        Bits part[M][N];
        Floats scaled[M][N];
        for (int m = 0; m < M; ++m) {
            for (int n = 0; n < N; ++n) part[m][n] = no_bits(), scaled[m][n] = zeros();
        }
#pragma GCC unroll 8
        for (int step = 0; step < kSteps<Format>; ++step) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                Bits codes[vectors];
                Format::decode(weights[n] + step * Format::kStepBytes, codes);
#pragma GCC unroll 4
                for (int m = 0; m < M; ++m) {
                    if (is_split) part[m][n] = no_bits();
                    const uint8_t* place = packed[m] + step * vectors * kBytes;
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v) {
                        part[m][n] = multiply_pairs(part[m][n], codes[v], load_bits(place + v * kBytes));
                    }
                    if constexpr (Format::kHasOffset) {
                        const Bits sum = load_bits(packed[m] + kNumberBytes<Format> + step * kBytes);
                        Bits offset;
                        if constexpr (!Z) {
                            offset = left32<3>(sum);
                        } else {
                            offset = multiply32(sum, spread_bits<lanes>(zero_points[n] + step * groups));
                        }
                        part[m][n] = subtract32(part[m][n], offset);
                    }
                    if constexpr (is_split) {
                        const Floats scale = spread<lanes>(scales[n] + step * groups);
                        scaled[m][n] = multiply_add(to_floats(part[m][n]), scale, scaled[m][n]);
                    }
                }
            }
        }
        for (int m = 0; m < M; ++m) {
            const float factor = float_of(load32(packed[m] + kFactorPlace<Format>));
            for (int n = 0; n < N; ++n) {
                if constexpr (is_split) {
                    sums[m][n] = multiply_add(scaled[m][n], all(factor), sums[m][n]);
                } else {
                    const Floats both_factors = all(G == 0 ? factor : factor * *scales[n]);
                    sums[m][n] = multiply_add(to_floats(part[m][n]), both_factors, sums[m][n]);
                }
            }
        }
    } else {
        Floats part[M][N];
        if constexpr (G != 0) {
            for (int m = 0; m < M; ++m) {
                for (int n = 0; n < N; ++n) part[m][n] = zeros();
            }
        }
        auto& target = *(G != 0 ? &part : reinterpret_cast<Floats(*)[M][N]>(sums));
#pragma GCC unroll 4
        for (int step = 0; step < kSteps<Format>; ++step) {
            typename VectorOf<Format>::type values[N][vectors];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                const uint8_t* from = weights[n] + step * Format::kStepBytes;
                Format::decode(from, values[n]);
                if constexpr (Format::kHasNan) {
                    seen[0] = larger_signed8(seen[0], load_bits(from));
                    seen[1] = larger_unsigned8(seen[1], load_bits(from));
                }
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                const uint8_t* place = packed[m] + step * vectors * kBytes;
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n) {
                        target[m][n] = multiply_packed(target[m][n], values[n][v], place + v * kBytes);
                    }
                }
                if constexpr (is_split) {
                    for (int n = 0; n < N; ++n) {
                        const Floats scale = spread<lanes>(scales[n] + step * groups);
                        sums[m][n] = multiply_add(part[m][n], scale, sums[m][n]);
                        part[m][n] = zeros();
                    }
                }
            }
        }
        if constexpr (G >= kBlock) {
            for (int m = 0; m < M; ++m) {
                for (int n = 0; n < N; ++n) {
                    sums[m][n] = multiply_add(part[m][n], all(*scales[n]), sums[m][n]);
                }
            }
        }
    }
}

MOEREG_INLINE bool has_nan_code(const uint8_t* row, int64_t count) {
    bool found = false;
    for (int64_t i = 0; i < count; ++i) found |= (row[i] & 0x7f) == 0x7f;
    return found;
}

// The products of M packed rows with rows [row, row + count) of an expert's weights, at most N of them.
template <class Format, int G, bool Z, int M>
void multiply_rows(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t row, int64_t count, const uint8_t* const* packed,
    bool prefetches, float* out, int64_t out_stride) {
    constexpr int N = rows_at_once<Format, M>();
    constexpr int block_bytes = kBlockWeightBytes<Format>, per_block = G == 0 ? 0 : kBlock / G;
    constexpr int buffered = kSegment * kBlock / kLeastGroup;
    const int64_t row_bytes = (matrix.columns * block_bytes + kBlock - 1) / kBlock;
    const int64_t groups = G == 0 ? 1 : (matrix.columns + G - 1) / G;
    const int64_t num_full = matrix.columns / kBlock, num_blocks = blocks_of(matrix.columns);
    const uint8_t* weights[N];
    const float* scales[N] = {};
    const uint32_t* zero_points[N] = {};
    int64_t rows[N], scale_rows[N];
    float scale_buffer[N][G == 0 ? 1 : buffered];
    uint32_t zero_buffer[N][Z ? buffered : 1];
    uint8_t copies[N][block_bytes];
    const uint8_t* inputs[M];
    Floats sums[M][N];
    Bits seen[2] = {no_bits(), no_bits()};
    for (int m = 0; m < M; ++m) {
        inputs[m] = packed[m];
        for (int n = 0; n < N; ++n) sums[m][n] = zeros();
    }
    for (int n = 0; n < N; ++n) {
        // A row that is not there is the last one again, and its result is dropped.
        rows[n] = expert * matrix.rows + row + smaller(n, count - 1);
        weights[n] = static_cast<const uint8_t*>(matrix.weight) + rows[n] * row_bytes;
        if constexpr (G != 0) {
            const int64_t scaled_rows = (matrix.rows + matrix.group_rows - 1) / matrix.group_rows;
            scale_rows[n] = expert * scaled_rows + (row + smaller(n, count - 1)) / matrix.group_rows;
        }
        if constexpr (Z && G == 0) {
            find_zero_points(matrix, rows[n], 1, 0, 1, zero_buffer[n]);
            zero_points[n] = zero_buffer[n];
        }
    }
    // Rows follow each other: what the next call reads lies these bytes ahead.
    const int64_t ahead = prefetches ? N * row_bytes : 0;
    for (int64_t first = 0; first < num_blocks;) {
        const bool is_partial = first == num_full;
        const int64_t last = is_partial ? num_blocks : smaller(first + kSegment, num_full);
        if (is_partial) {
            // Copied, since nothing past the last row may be read.
            memset(copies, 0, sizeof copies);
            for (int n = 0; n < N; ++n) {
                memcpy(copies[n], weights[n], static_cast<size_t>(row_bytes - num_full * block_bytes));
                weights[n] = copies[n];
            }
        }
        if constexpr (G != 0) {
            const int64_t begin = first * per_block, num = smaller(last * per_block, groups) - begin;
            if (is_partial) memset(scale_buffer, 0, sizeof scale_buffer);
            if (Z && is_partial) memset(zero_buffer, 0, sizeof zero_buffer);
            for (int n = 0; n < N; ++n) {
                scales[n] = find_scales(matrix, scale_rows[n], groups, begin, num, is_partial, scale_buffer[n]);
                if constexpr (Z) {
                    find_zero_points(matrix, rows[n], groups, begin, num, zero_buffer[n]);
                    zero_points[n] = zero_buffer[n];
                }
            }
        }
        for (; first < last; ++first) {
            for (int n = 0; n < N; ++n) {
                for (int line = 0; line < block_bytes; line += 64) __builtin_prefetch(weights[n] + ahead + line, 0, 2);
            }
            add_block<Format, G, Z, M, N>(weights, inputs, scales, zero_points, sums, seen);
            for (int n = 0; n < N; ++n) {
                weights[n] += block_bytes;
                if constexpr (G != 0) scales[n] += per_block;
                if constexpr (Z && G != 0) zero_points[n] += per_block;
            }
            for (int m = 0; m < M; ++m) inputs[m] += packed_bytes<Format>();
        }
    }
    bool may_have_nan = false;
    if constexpr (Format::kHasNan) may_have_nan = has_byte(seen[0], 0x7f) || has_byte(seen[1], 0xff);
    for (int n = 0; n < N && n < count; ++n) {
        float factor = row_factor(matrix, expert, row + n);
        if (Format::kHasNan && may_have_nan) {
            const uint8_t* codes = static_cast<const uint8_t*>(matrix.weight) + rows[n] * row_bytes;
            if (has_nan_code(codes, row_bytes)) factor = __builtin_nanf("");
        }
        for (int m = 0; m < M; ++m) out[m * out_stride + n] = sum_of(sums[m][n]) * Format::kResult * factor;
    }
}

template <class Format, int G, bool Z, int M>
MOEREG_INLINE void multiply_group(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, const uint8_t* const* packed,
    bool prefetches, float* out, int64_t out_stride) {
    constexpr int N = rows_at_once<Format, M>();
    for (int64_t row = begin; row < end; row += N) {
        const int64_t count = smaller(N, end - row);
        multiply_rows<Format, G, Z, M>(
            matrix, expert, row, count, packed, prefetches, out + row - begin, out_stride);
    }
}

template <class Format, int G, bool Z>
void multiply(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, const void* const* packed,
    int64_t num_rows, float* out, int64_t out_stride) {
    const uint8_t* const* inputs = reinterpret_cast<const uint8_t* const*>(packed);
    // A few rows of weights stay in the first cache while all packed rows pass.
    for (int64_t row = begin; row < end; row += kGroupRows) {
        const int64_t stop = smaller(row + kGroupRows, end);
        for (int64_t m = 0; m < num_rows; m += 4) {
            float* to = out + m * out_stride + row - begin;
            const bool is_first = m == 0;
            switch (num_rows - m) {
                case 1: multiply_group<Format, G, Z, 1>(matrix, expert, row, stop, inputs + m, is_first, to, out_stride); break;
                case 2: multiply_group<Format, G, Z, 2>(matrix, expert, row, stop, inputs + m, is_first, to, out_stride); break;
                case 3: multiply_group<Format, G, Z, 3>(matrix, expert, row, stop, inputs + m, is_first, to, out_stride); break;
                default: multiply_group<Format, G, Z, 4>(matrix, expert, row, stop, inputs + m, is_first, to, out_stride);
            }
        }
    }
}

// --- the table ---

// One row of what the table computes: weights of one format in one kind of group.
struct Kernel {
    int32_t format;
    int32_t group_columns;
    bool has_zero_points;
    int64_t packed_block_bytes;
    void (*pack)(const moereg_cpu_matrix&, const void*, int32_t, float, void*);
    void (*product)(
        const moereg_cpu_matrix&, int64_t, int64_t, int64_t, const void* const*, int64_t, float*, int64_t);
};

template <class Format, int G, bool Z> constexpr Kernel kernel(int32_t format) {
    return {format, G, Z, packed_bytes<Format>(), pack_row<Format>, multiply<Format, G, Z>};
}

constexpr Kernel kKernels[] = {
    kernel<BFloat16Weights, 0, false>(MOEREG_CPU_BF16), kernel<Float16, 0, false>(MOEREG_CPU_F16),
    kernel<Float32, 0, false>(MOEREG_CPU_F32),          kernel<Int8, 0, false>(MOEREG_CPU_I8),
    kernel<UInt4, 128, false>(MOEREG_CPU_U4),           kernel<UInt4, 128, true>(MOEREG_CPU_U4),
    kernel<UInt4, 64, false>(MOEREG_CPU_U4),            kernel<UInt4, 64, true>(MOEREG_CPU_U4),
    kernel<UInt4, 32, false>(MOEREG_CPU_U4),            kernel<UInt4, 32, true>(MOEREG_CPU_U4),
    kernel<UInt4, 0, false>(MOEREG_CPU_U4),             kernel<UInt4, 0, true>(MOEREG_CPU_U4),
    kernel<Float4, 32, false>(MOEREG_CPU_E2M1),         kernel<Float4, 16, false>(MOEREG_CPU_E2M1),
    kernel<Float8, 0, false>(MOEREG_CPU_E4M3),          kernel<Float8, 128, false>(MOEREG_CPU_E4M3),
    kernel<Float8, 32, false>(MOEREG_CPU_E4M3),
};

const Kernel* find_kernel(const moereg_cpu_matrix& matrix) {
    for (const Kernel& kernel : kKernels) {
        if (kernel.format == matrix.format && kernel.group_columns == matrix.group_columns &&
            kernel.has_zero_points == (matrix.zero_point != nullptr)) {
            return &kernel;
        }
    }
    return nullptr;
}

int64_t packed_block_bytes(const moereg_cpu_matrix& matrix) {
    const Kernel* found = find_kernel(matrix);
    return found == nullptr ? 0 : found->packed_block_bytes;
}

void pack(const moereg_cpu_matrix& matrix, const void* row, int32_t format, float factor, void* packed) {
    find_kernel(matrix)->pack(matrix, row, format, factor, packed);
}

void product(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, const void* const* packed,
    int64_t num_rows, float* out, int64_t out_stride) {
    find_kernel(matrix)->product(matrix, expert, begin, end, packed, num_rows, out, out_stride);
}

uint64_t read(const void* memory, int64_t num_bytes) {
    const uint8_t* from = static_cast<const uint8_t*>(memory);
    Bits sums[4] = {no_bits(), no_bits(), no_bits(), no_bits()};
    int64_t place = 0;
    for (; place + 4 * kBytes <= num_bytes; place += 4 * kBytes) {
        for (int line = 0; line < 4 * kBytes; line += 64) __builtin_prefetch(from + place + 4096 + line, 0, 2);
        for (int i = 0; i < 4; ++i) sums[i] = add32(sums[i], load_bits(from + place + i * kBytes));
    }
    const Bits all_sums = add32(add32(sums[0], sums[1]), add32(sums[2], sums[3]));
    uint32_t lanes[kLanes];
    memcpy(lanes, &all_sums, sizeof lanes);
    uint64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    for (; place < num_bytes; ++place) sum += from[place];
    return sum;
}

constexpr Table table_of(const char* name) {
    return {name, packed_block_bytes, pack, product, activate, add_scaled, widen_floats, store_floats, read};
}

}  // namespace
