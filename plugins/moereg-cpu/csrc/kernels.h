// Products of a few packed rows with rows of weights, which are read once, in canonical order, and decoded in
// registers. A translation unit includes this once, with the compiler options of its instruction set.
//
// A register of the decoded weights holds every V-th column of a step of V registers, since taking a byte apart by
// shifts and masks leaves its parts there; shuffles would cost more. Packing gives the activations the same order.
//
// 16- and 32-bit weights and 8-bit floats are multiplied as fp32. Integers and 4-bit floats, whose doubles are
// integers, are multiplied as integers, with exact sums: per block of 128 columns, activations are 16-bit integers
// times one fp32 number, off by at most 2^-16 of the block's largest. That is below the rounding of bfloat16 and
// float16 inputs, and takes half of the instructions of fp32. 4-bit weights are unsigned bytes there, and activations
// two signed ones.
#pragma once

#include "numbers.h"
#include "table.h"
#include "vectors.h"

namespace {

using moereg_cpu::Table;

// Blocks of columns whose scales are decoded at a time.
constexpr int kSegment = 16;
constexpr int kLeastGroup = 16;
// A tile's rows are read in this many streams, a part of the tile each. Rows next to each other would be as many
// streams within a page or two, which prefetchers in hardware mistake for one.
constexpr int kStreams = 4;
// Bytes by which software prefetches ahead in each stream.
constexpr int64_t kAhead = 2048;

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
        const Bits even = signed_right16<4>(left16<8>(bits)), odd = signed_right16<4>(bits);
        to[0] = as_floats(both(left32<16>(even), mask));
        to[1] = as_floats(both(left32<16>(odd), mask));
        to[2] = as_floats(both(even, mask));
        to[3] = as_floats(both(odd, mask));
    }
};

struct Int8 {
    static constexpr bool kIsInteger = true, kHasNan = false, kIsBytes = false;
    static constexpr int kVectors = 2, kStep = 2 * kShorts, kStepBytes = kStep;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Bits* to) {
        const Bits bits = load_bits(from);
        to[0] = signed_right16<8>(left16<8>(bits));
        to[1] = signed_right16<8>(bits);
    }
};

// Codes stay unsigned. What their zero means for a sum is the zero times the sum of the activations, which packing
// finds once: times kZero, or with zero points times 1.
template <bool has_zero_points> struct UInt4 {
    static constexpr bool kIsInteger = true, kHasNan = false, kIsBytes = true;
    static constexpr int kVectors = 2, kStep = 2 * kBytes, kStepBytes = kBytes, kZero = has_zero_points ? 1 : 8;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Bits* to) {
        const Bits bits = load_bits(from), mask = all_bits(0x0f0f0f0f);
        to[0] = both(bits, mask);
        to[1] = both(right16<4>(bits), mask);
    }
};

// Twice the value of each code, plus 12; packing halves the activations' factor.
struct Float4 {
    static constexpr bool kIsInteger = true, kHasNan = false, kIsBytes = true;
    static constexpr int kVectors = 2, kStep = 2 * kBytes, kStepBytes = kBytes, kZero = 12;
    static constexpr float kFactor = 0.5f, kResult = 1.0f;
    MOEREG_INLINE void decode(const uint8_t* from, Bits* to) {
        static constexpr uint8_t kValues[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        const Bits bits = load_bits(from), mask = all_bits(0x0f0f0f0f);
        to[0] = look_up(kValues, both(bits, mask));
        to[1] = look_up(kValues, both(right16<4>(bits), mask));
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

// A block of packed activations: its numbers, for bytes also sums for their zeros, and for integers the fp32 factor.
template <class Format> constexpr int packed_number_bytes() {
    return kBlock * (Format::kIsInteger || Format::kStep == 2 * kLanes * Format::kVectors ? 2 : 4);
}
template <class Format> constexpr int packed_bytes() {
    if constexpr (!Format::kIsInteger) {
        return packed_number_bytes<Format>();
    } else {
        return packed_number_bytes<Format>() + (Format::kIsBytes ? kSteps<Format> * kBytes : 0) + 64;
    }
}
template <class Format> constexpr int kFactorPlace = packed_bytes<Format>() - 64;

// Its high and low bytes are both signed: 127 * 256 + 127.
constexpr float kLargestCode = 32639.0f;

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
        const float multiplier = is_finite && !is_tiny ? kLargestCode / float_of(largest) : 0.0f;
        const float step = is_finite ? (is_tiny ? 0.0f : float_of(largest) / kLargestCode) : __builtin_nanf("");
        const float factor = step * Format::kFactor;
        memcpy(to + kFactorPlace<Format>, &factor, sizeof factor);
        int32_t codes[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            codes[i] = static_cast<int32_t>(bits_of(numbers[i] * multiplier + 12582912.0f) - 0x4b400000);
        }
        if (multiplier == 0) memset(codes, 0, sizeof codes);
        if constexpr (Format::kIsBytes) {
            for (int first = 0; first < kBlock; first += Format::kStep) {
                // All high bytes of a step, then all low ones.
                for (int v = 0; v < vectors; ++v) {
                    for (int lane = 0; lane < kBytes; ++lane) {
                        const int32_t code = codes[first + lane * vectors + v], high = (code + 128) >> 8;
                        to[v * kBytes + lane] = static_cast<uint8_t>(high);
                        to[(vectors + v) * kBytes + lane] = static_cast<uint8_t>(code - 256 * high);
                    }
                }
                to += 2 * vectors * kBytes;
            }
            constexpr int span = Format::kStep / kLanes;
            for (int first = 0; first < kBlock; first += span) {
                int32_t sum = 0;
                for (int i = 0; i < span; ++i) sum += codes[first + i];
                sum *= Format::kZero;
                memcpy(to, &sum, sizeof sum);
                to += sizeof sum;
            }
        } else {
            for (int first = 0; first < kBlock; first += Format::kStep) {
                for (int v = 0; v < vectors; ++v) {
                    for (int lane = 0; lane < kShorts; ++lane) {
                        const int16_t code = static_cast<int16_t>(codes[first + lane * vectors + v]);
                        memcpy(to, &code, sizeof code);
                        to += sizeof code;
                    }
                }
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
    if (M == 1) return 4;
    if (Format::kIsInteger) return kLanes == 16 ? (M == 2 ? 4 : 2) : (M == 2 ? 2 : 1);
    return kLanes == 16 && Format::kVectors < 4 ? 4 : 2;
}

// Adds the products of one block of columns. NaN codes are looked for in `seen`.
template <class Format, int G, bool Z, int M, int N>
MOEREG_INLINE void add_block(
    const uint8_t* const* weights, const uint8_t* const* packed, const float* const* scales,
    const uint32_t* const* zero_points, Floats (&sums)[M][N], Bits (&seen)[2]) {
    constexpr int vectors = Format::kVectors;
    // Lanes that share a scale in a step, and groups of a step; of whole blocks there is one scale.
    constexpr bool is_split = G != 0 && G < kBlock;
    constexpr int span = Format::kStep / kLanes, lanes = is_split ? G / span : kLanes;
    constexpr int groups = is_split ? Format::kStep / G : 0;
    if constexpr (Format::kIsInteger) {
        constexpr bool is_bytes = Format::kIsBytes;
        Bits part[M][N], low[M][N];
        Floats scaled[M][N];
        MOEREG_UNROLL
        for (int m = 0; m < M; ++m) {
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) part[m][n] = low[m][n] = no_bits(), scaled[m][n] = zeros();
        }
        // 32-bit sums of the steps [first, last), less what the codes' zeros add.
        const auto finish = [&](int m, int n, int first, int last) MOEREG_LAMBDA {
            if constexpr (!is_bytes) return part[m][n];
            Bits sum = combine_bytes(part[m][n], low[m][n]);
            MOEREG_UNROLL
            for (int step = first; step < last; ++step) {
                Bits zero = load_bits(packed[m] + packed_number_bytes<Format>() + step * kBytes);
                if constexpr (Z) zero = multiply32(zero, spread_bits<lanes>(zero_points[n] + step * groups));
                sum = subtract32(sum, zero);
            }
            return sum;
        };
        MOEREG_UNROLL
        for (int step = 0; step < kSteps<Format>; ++step) {
            Bits codes[N][vectors];
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) Format::decode(weights[n] + step * Format::kStepBytes, codes[n]);
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) {
                const uint8_t* place = packed[m] + step * vectors * (is_bytes ? 2 : 1) * kBytes;
                MOEREG_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    const Bits input = load_bits(place + v * kBytes);
                    const Bits rest = is_bytes ? load_bits(place + (vectors + v) * kBytes) : input;
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        if constexpr (is_bytes) {
                            part[m][n] = multiply_bytes(part[m][n], codes[n][v], input);
                            low[m][n] = multiply_bytes(low[m][n], codes[n][v], rest);
                        } else {
                            part[m][n] = multiply_pairs(part[m][n], codes[n][v], input);
                        }
                    }
                }
                if constexpr (is_split) {
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        const Floats scale = spread<lanes>(scales[n] + step * groups);
                        scaled[m][n] = multiply_add(to_floats(finish(m, n, step, step + 1)), scale, scaled[m][n]);
                        part[m][n] = low[m][n] = no_bits();
                    }
                }
            }
        }
        MOEREG_UNROLL
        for (int m = 0; m < M; ++m) {
            const float factor = float_of(load32(packed[m] + kFactorPlace<Format>));
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) {
                if constexpr (is_split) {
                    sums[m][n] = multiply_add(scaled[m][n], all(factor), sums[m][n]);
                } else {
                    const Floats both_factors = all(G == 0 ? factor : factor * *scales[n]);
                    const Bits sum = finish(m, n, 0, kSteps<Format>);
                    sums[m][n] = multiply_add(to_floats(sum), both_factors, sums[m][n]);
                }
            }
        }
    } else {
        Floats part[M][N];
        if constexpr (G != 0) {
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) {
                MOEREG_UNROLL
                for (int n = 0; n < N; ++n) part[m][n] = zeros();
            }
        }
        auto& target = G != 0 ? part : sums;
        MOEREG_UNROLL
        for (int step = 0; step < kSteps<Format>; ++step) {
            typename VectorOf<Format>::type values[N][vectors];
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) {
                const uint8_t* from = weights[n] + step * Format::kStepBytes;
                Format::decode(from, values[n]);
                if constexpr (Format::kHasNan) {
                    seen[0] = larger_signed8(seen[0], load_bits(from));
                    seen[1] = larger_unsigned8(seen[1], load_bits(from));
                }
                if constexpr (M == 1) {
                    // At once, since the values of all rows do not fit into registers.
                    MOEREG_UNROLL
                    for (int v = 0; v < vectors; ++v) {
                        const uint8_t* input = packed[0] + (step * vectors + v) * kBytes;
                        target[0][n] = multiply_packed(target[0][n], values[n][v], input);
                    }
                }
            }
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) {
                const uint8_t* place = packed[m] + step * vectors * kBytes;
                MOEREG_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    MOEREG_UNROLL
                    for (int n = 0; n < N && M > 1; ++n) {
                        target[m][n] = multiply_packed(target[m][n], values[n][v], place + v * kBytes);
                    }
                }
                if constexpr (is_split) {
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        const Floats scale = spread<lanes>(scales[n] + step * groups);
                        sums[m][n] = multiply_add(part[m][n], scale, sums[m][n]);
                        part[m][n] = zeros();
                    }
                }
            }
        }
        if constexpr (G >= kBlock) {
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) {
                MOEREG_UNROLL
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

// The products of M packed rows with N rows of an expert's weights: `row`, and others `apart` rows from each other, as
// far as they are below `end`. out[m * out_stride] is for `row`.
template <class Format, int G, bool Z, int M>
void multiply_rows(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t row, int64_t apart, int64_t end,
    const uint8_t* const* packed, bool prefetches, float* out, int64_t out_stride) {
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
    MOEREG_UNROLL
    for (int m = 0; m < M; ++m) {
        inputs[m] = packed[m];
        MOEREG_UNROLL
        for (int n = 0; n < N; ++n) sums[m][n] = zeros();
    }
    MOEREG_UNROLL
    for (int n = 0; n < N; ++n) {
        // A row that is not there is the first one again, and its result is dropped.
        const int64_t place = row + n * apart < end ? row + n * apart : row;
        rows[n] = expert * matrix.rows + place;
        weights[n] = static_cast<const uint8_t*>(matrix.weight) + rows[n] * row_bytes;
        if constexpr (G != 0) {
            const int64_t scaled_rows = (matrix.rows + matrix.group_rows - 1) / matrix.group_rows;
            scale_rows[n] = expert * scaled_rows + place / matrix.group_rows;
        }
        if constexpr (Z && G == 0) {
            find_zero_points(matrix, rows[n], 1, 0, 1, zero_buffer[n]);
            zero_points[n] = zero_buffer[n];
        }
    }
    const int64_t ahead = prefetches ? kAhead : 0;
    for (int64_t first = 0; first < num_blocks;) {
        const bool is_partial = first == num_full;
        const int64_t last = is_partial ? num_blocks : smaller(first + kSegment, num_full);
        if (is_partial) {
            // Copied, since nothing past the last row may be read.
            memset(copies, 0, sizeof copies);
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) {
                const int64_t begin = num_full * block_bytes;
                memcpy(copies[n], weights[n] + begin, static_cast<size_t>(row_bytes - begin));
                weights[n] = copies[n];
            }
        }
        if constexpr (G != 0) {
            const int64_t begin = first * per_block, num = smaller(last * per_block, groups) - begin;
            if (is_partial) memset(scale_buffer, 0, sizeof scale_buffer);
            if (Z && is_partial) memset(zero_buffer, 0, sizeof zero_buffer);
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) {
                scales[n] = find_scales(matrix, scale_rows[n], groups, begin, num, is_partial, scale_buffer[n]);
                if constexpr (Z) {
                    find_zero_points(matrix, rows[n], groups, begin, num, zero_buffer[n]);
                    zero_points[n] = zero_buffer[n];
                }
            }
        }
        for (int64_t block = first; block < last; ++block) {
            const uint8_t *block_weights[N], *block_inputs[M];
            const float* block_scales[N];
            const uint32_t* block_zero_points[N];
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) {
                block_weights[n] = weights[n] + (is_partial ? 0 : block * block_bytes);
                MOEREG_UNROLL
                for (int line = 0; line < block_bytes; line += 64) {
                    __builtin_prefetch(block_weights[n] + ahead + line, 0, 2);
                }
                block_scales[n] = scales[n] + (block - first) * per_block;
                block_zero_points[n] = Z ? zero_points[n] + (block - first) * per_block : nullptr;
            }
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) block_inputs[m] = inputs[m] + block * packed_bytes<Format>();
            if constexpr (M == 1 && Format::kIsInteger) {
                // Row by row, since the sums of several do not fit into registers.
                MOEREG_UNROLL
                for (int n = 0; n < N; ++n) {
                    Floats sum[1][1] = {{sums[0][n]}};
                    add_block<Format, G, Z, 1, 1>(
                        block_weights + n, block_inputs, block_scales + n, block_zero_points + n, sum, seen);
                    sums[0][n] = sum[0][0];
                }
            } else {
                add_block<Format, G, Z, M, N>(
                    block_weights, block_inputs, block_scales, block_zero_points, sums, seen);
            }
        }
        first = last;
    }
    bool may_have_nan = false;
    if constexpr (Format::kHasNan) may_have_nan = has_byte(seen[0], 0x7f) || has_byte(seen[1], 0xff);
    MOEREG_UNROLL
    for (int n = 0; n < N; ++n) {
        if (row + n * apart >= end) break;
        float factor = row_factor(matrix, expert, row + n * apart);
        if (Format::kHasNan && may_have_nan) {
            const uint8_t* codes = static_cast<const uint8_t*>(matrix.weight) + rows[n] * row_bytes;
            if (has_nan_code(codes, row_bytes)) factor = __builtin_nanf("");
        }
        MOEREG_UNROLL
        for (int m = 0; m < M; ++m) out[m * out_stride + n * apart] = sum_of(sums[m][n]) * Format::kResult * factor;
    }
}

template <class Format, int G, bool Z, int M>
MOEREG_INLINE void multiply_group(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t row, int64_t apart, int64_t end,
    const uint8_t* const* packed, bool prefetches, float* out, int64_t out_stride) {
    constexpr int N = rows_at_once<Format, M>();
    for (int stream = 0; stream < kStreams; stream += N) {
        const int64_t begin = row + stream * apart;
        if (begin >= end) return;
        multiply_rows<Format, G, Z, M>(
            matrix, expert, begin, apart, end, packed, prefetches, out + stream * apart, out_stride);
    }
}

template <class Format, int G, bool Z>
void multiply(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, const void* const* packed,
    int64_t num_rows, float* out, int64_t out_stride) {
    const uint8_t* const* inputs = reinterpret_cast<const uint8_t* const*>(packed);
    const int64_t apart = (end - begin + kStreams - 1) / kStreams;
    // One row of each stream stays in the first cache while all packed rows pass.
    for (int64_t row = begin; row < begin + apart; ++row) {
        for (int64_t m = 0; m < num_rows; m += 4) {
            const uint8_t* const* at = inputs + m;
            float* to = out + m * out_stride + row - begin;
            const bool is_first = m == 0;
            switch (num_rows - m) {
                case 1:
                    multiply_group<Format, G, Z, 1>(matrix, expert, row, apart, end, at, is_first, to, out_stride);
                    break;
                case 2:
                    multiply_group<Format, G, Z, 2>(matrix, expert, row, apart, end, at, is_first, to, out_stride);
                    break;
                case 3:
                    multiply_group<Format, G, Z, 3>(matrix, expert, row, apart, end, at, is_first, to, out_stride);
                    break;
                default:
                    multiply_group<Format, G, Z, 4>(matrix, expert, row, apart, end, at, is_first, to, out_stride);
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
    kernel<BFloat16Weights, 0, false>(MOEREG_CPU_BF16),
    kernel<Float16, 0, false>(MOEREG_CPU_F16),
    kernel<Float32, 0, false>(MOEREG_CPU_F32),
    kernel<Int8, 0, false>(MOEREG_CPU_I8),
    kernel<UInt4<false>, 128, false>(MOEREG_CPU_U4),
    kernel<UInt4<true>, 128, true>(MOEREG_CPU_U4),
    kernel<UInt4<false>, 64, false>(MOEREG_CPU_U4),
    kernel<UInt4<true>, 64, true>(MOEREG_CPU_U4),
    kernel<UInt4<false>, 32, false>(MOEREG_CPU_U4),
    kernel<UInt4<true>, 32, true>(MOEREG_CPU_U4),
    kernel<UInt4<false>, 0, false>(MOEREG_CPU_U4),
    kernel<UInt4<true>, 0, true>(MOEREG_CPU_U4),
    kernel<Float4, 32, false>(MOEREG_CPU_E2M1),
    kernel<Float4, 16, false>(MOEREG_CPU_E2M1),
    kernel<Float8, 0, false>(MOEREG_CPU_E4M3),
    kernel<Float8, 128, false>(MOEREG_CPU_E4M3),
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

// In as many streams as products read.
uint64_t read(const void* memory, int64_t num_bytes) {
    const uint8_t* from = static_cast<const uint8_t*>(memory);
    const int64_t apart = num_bytes / kStreams / kBytes * kBytes;
    Bits sums[kStreams] = {};
    for (int64_t place = 0; place < apart; place += kBytes) {
        for (int i = 0; i < kStreams; ++i) {
            if (place % 64 == 0) __builtin_prefetch(from + i * apart + place + kAhead, 0, 2);
            sums[i] = add32(sums[i], load_bits(from + i * apart + place));
        }
    }
    uint64_t sum = 0;
    for (int i = 0; i < kStreams; ++i) {
        uint32_t lanes[kLanes];
        memcpy(lanes, &sums[i], sizeof lanes);
        for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    }
    return sum;
}

constexpr Table table_of(const char* name) {
    return {name, packed_block_bytes, pack, product, activate, add_scaled, widen_floats, store_floats, read};
}

}  // namespace
