// Products of a few packed rows with rows of weights, which are read once, in canonical order, and decoded in
// registers. A translation unit includes this once, with the compiler options of its instruction set.
//
// A register of the decoded weights holds every V-th column of a step of V registers, since taking a byte apart by
// shifts and masks leaves its parts there; shuffles would cost more. Packing gives the activations the same order.
//
// 16- and 32-bit weights and 8-bit floats are multiplied as fp32. Integers and 4-bit floats, whose doubles are
// integers, are multiplied as integers, with exact sums: per block of 128 columns, activations are 16-bit integers
// times one fp32 number, off by at most 2^-16 of the block's largest. That is below the rounding of 16-bit inputs, unless
// one column is a thousand times the others and all of its weights are zero, and takes half of the instructions of fp32.
// 4-bit weights are unsigned bytes there, and activations two signed ones. With int8 weights, activations may also be
// int8, with one scale per row.
#pragma once

#include "numbers.h"
#include "scales.h"
#include "table.h"
#include "vectors.h"

namespace {

using moereg_cpu::kMaxRows;
using moereg_cpu::Table;

// Blocks of columns whose scales are decoded at a time.
constexpr int kSegment = 16;
constexpr int kLeastGroup = 16;
// A tile's rows are read in this many streams, a part of the tile each. Rows next to each other would be as many
// streams within a page or two, which prefetchers in hardware mistake for one.
constexpr int kStreams = 4;
// Bytes by which software prefetches ahead in each stream.
constexpr int64_t kAhead = 2048;

// Of many packed rows: blocks of columns, and rows of weights that are multiplied by them at a time.
constexpr int64_t kSpan = 2, kSpanRows = 32;

// --- formats: how a step of weights becomes registers, number v of them ---

struct Float32 {
    static constexpr bool kIsInteger = false, kIsBytes = false, kHasNan = false;
    static constexpr int kVectors = 1, kStep = kLanes, kStepBytes = 4 * kStep;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE Floats decode(const uint8_t* from, int) { return as_floats(load_bits(from)); }
};

struct Float16 {
    static constexpr bool kIsInteger = false, kIsBytes = false, kHasNan = false;
    static constexpr int kVectors = 1, kStep = kLanes, kStepBytes = 2 * kStep;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE Floats decode(const uint8_t* from, int) { return load_halves(from); }
};

struct BFloat16 {
    static constexpr bool kIsInteger = false, kIsBytes = false, kHasNan = false;
    static constexpr int kVectors = 2, kStep = 2 * kLanes, kStepBytes = kBytes;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE Floats decode(const uint8_t* from, int v) {
        const Bits bits = load_bits(from);
        return as_floats(v == 0 ? left32<16>(bits) : both(bits, all_bits(0xffff0000)));
    }
};

// A code's sign, exponent and mantissa where fp32 has them is 2^-120 of its value, also if the code is subnormal. Half
// of that factor is in the packed activations, and half in the result, so that inputs below 2^67 leave neither
// out of the range of fp32.
struct Float8 {
    static constexpr bool kIsInteger = false, kIsBytes = false, kHasNan = true;
    static constexpr int kVectors = 4, kStep = 4 * kLanes, kStepBytes = kStep;
    static constexpr float kFactor = 0x1p60f, kResult = 0x1p60f;
    MOEREG_INLINE Floats decode(const uint8_t* from, int v) {
        const Bits bits = load_bits(from), placed = signed_right16<4>(v % 2 == 0 ? left16<8>(bits) : bits);
        return as_floats(both(v < 2 ? left32<16>(placed) : placed, all_bits(0x87f00000)));
    }
};

struct Int8 {
    static constexpr bool kIsInteger = true, kIsBytes = false, kHasNan = false, kRoundsTokens = false;
    static constexpr int kVectors = 2, kStep = 2 * kShorts, kStepBytes = kStep;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE Bits decode(const uint8_t* from, int v) {
        const Bits bits = load_bits(from);
        return signed_right16<8>(v == 0 ? left16<8>(bits) : bits);
    }
};

// int8 weights and int8 activations, with one scale per token.
#ifdef __AVX512VNNI__
struct Int8Tokens {
    static constexpr bool kIsInteger = true, kIsBytes = true, kHasNan = false, kRoundsTokens = true;
    static constexpr int kVectors = 1, kStep = kBytes, kStepBytes = kStep, kZero = 128;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    // Plus 128, since the instruction multiplies unsigned by signed bytes.
    MOEREG_INLINE Bits decode(const uint8_t* from, int) {
        return _mm512_xor_si512(load_bits(from), all_bits(0x80808080));
    }
};
#else
struct Int8Tokens : Int8 {
    static constexpr bool kRoundsTokens = true;
};
#endif

// Codes stay unsigned. What their zero means for a sum is the zero times the sum of the activations, which packing
// finds once: times kZero, or with zero points times 1.
template <bool has_zero_points> struct UInt4 {
    static constexpr bool kIsInteger = true, kIsBytes = true, kHasNan = false, kRoundsTokens = false;
    static constexpr int kVectors = 2, kStep = 2 * kBytes, kStepBytes = kBytes, kZero = has_zero_points ? 1 : 8;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE Bits decode(const uint8_t* from, int v) {
        const Bits bits = load_bits(from);
        return both(v == 0 ? bits : right16<4>(bits), all_bits(0x0f0f0f0f));
    }
};

// Twice the value of each code, plus 12; packing halves the activations' factor.
struct Float4 {
    static constexpr bool kIsInteger = true, kIsBytes = true, kHasNan = false, kRoundsTokens = false;
    static constexpr int kVectors = 2, kStep = 2 * kBytes, kStepBytes = kBytes, kZero = 12;
    static constexpr float kFactor = 0.5f, kResult = 1.0f;
    MOEREG_INLINE Bits decode(const uint8_t* from, int v) {
        static constexpr uint8_t kValues[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        return look_up(kValues, UInt4<false>::decode(from, v));
    }
};

#ifdef __AVX512BF16__
// Pairs of bfloat16 are multiplied as they are; activations are rounded to bfloat16.
struct BFloat16Pairs {
    static constexpr bool kIsInteger = false, kIsBytes = false, kHasNan = false;
    static constexpr int kVectors = 1, kStep = 2 * kLanes, kStepBytes = kBytes;
    static constexpr float kFactor = 1.0f, kResult = 1.0f;
    MOEREG_INLINE Bits decode(const uint8_t* from, int) { return load_bits(from); }
};
using BFloat16Weights = BFloat16Pairs;
MOEREG_INLINE Floats multiply_packed(Floats sum, Bits weights, Bits packed) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)packed);
}
#else
using BFloat16Weights = BFloat16;
#endif

MOEREG_INLINE Floats multiply_packed(Floats sum, Floats weights, Bits packed) {
    return multiply_add(weights, as_floats(packed), sum);
}

// --- packed rows ---

template <class Format> constexpr int kSteps = kBlock / Format::kStep;
template <class Format> constexpr int kBlockWeightBytes = kSteps<Format> * Format::kStepBytes;

// Registers of packed activations for one of decoded weights.
template <class Format> constexpr int parts_of() {
    if constexpr (Format::kIsInteger) return Format::kIsBytes && !Format::kRoundsTokens ? 2 : 1;
    return 1;
}

// Bytes of a block of packed activations.
template <class Format> constexpr int packed_bytes() {
    if constexpr (Format::kIsInteger) return kBlock * (Format::kIsBytes ? parts_of<Format>() : 2);
    return kBlock * (Format::kStep == 2 * kLanes * Format::kVectors ? 2 : 4);
}

// Groups of a block that have numbers of their own in a packed row: of bytes, all that have a scale, else the block.
template <class Format, int G> constexpr int packed_groups() {
    if constexpr (Format::kIsInteger && G != 0) return kBlock / G;
    return 1;
}

// Rows of integers go on behind their blocks: the fp32 factor of each group, and for bytes what its zeros add to a
// product, before its scale.
template <class Format> int64_t factors_place(int64_t columns) { return blocks_of(columns) * packed_bytes<Format>(); }
template <class Format, int G> int64_t factors_bytes(int64_t columns) {
    return rounded_up(4 * blocks_of(columns) * packed_groups<Format, G>(), kBytes);
}
template <class Format, int G> int64_t zeros_place(int64_t columns) {
    return factors_place<Format>(columns) + factors_bytes<Format, G>(columns);
}
template <class Format, int G> int64_t packed_row_bytes(int64_t columns) {
    // An odd number of spans, else a span of all rows would fall into the same sets of the first cache.
    if constexpr (!Format::kIsInteger) return ((blocks_of(columns) + 1) / 4 * 4 + kSpan) * packed_bytes<Format>();
    return zeros_place<Format, G>(columns) + (Format::kIsBytes ? factors_bytes<Format, G>(columns) : 0);
}

// The largest code: its high and low bytes are both signed, 127 * 256 + 127.
template <class Format> constexpr float kLargestCode = Format::kRoundsTokens ? 127.0f : 32639.0f;

// The step of codes whose largest magnitude is `largest`, as bits. A number that is not finite makes all of its row
// NaN. Steps that are not normal count as 0.
template <class Format> float step_of(uint32_t largest) {
    if (largest >= 0x7f800000) return __builtin_nanf("");
    return largest < bits_of(0x1p-110f) ? 0.0f : float_of(largest) / kLargestCode<Format>;
}

MOEREG_INLINE uint32_t largest_magnitude(const float* numbers) {
    uint32_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
        const uint32_t magnitude = bits_of(numbers[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// Packs a block of integers, multiples of `step`; what the zeros of its groups of `span` columns add goes to zeros[].
template <class Format> float pack_integers(const float* numbers, float step, uint8_t* to, int span, float* zeros) {
    constexpr int vectors = Format::kVectors, parts = parts_of<Format>();
    const float factor = step * Format::kFactor;
    int32_t codes[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        // Nearest, halves to even.
        codes[i] = static_cast<int32_t>(bits_of(numbers[i] / step + 12582912.0f) - 0x4b400000);
    }
    if (!(step > 0)) memset(codes, 0, sizeof codes);
    if constexpr (Format::kIsBytes) {
        for (int first = 0; first < kBlock; first += Format::kStep) {
            // All high bytes of a step, then all low ones; or low ones alone.
            for (int v = 0; v < vectors; ++v) {
                for (int lane = 0; lane < kBytes; ++lane) {
                    const int32_t code = codes[first + lane * vectors + v], high = (code + 128) >> 8;
                    if (parts == 2) to[v * kBytes + lane] = static_cast<uint8_t>(high);
                    to[((parts - 1) * vectors + v) * kBytes + lane] = static_cast<uint8_t>(code - 256 * high);
                }
            }
            to += parts * vectors * kBytes;
        }
        for (int first = 0; first < kBlock; first += span) {
            int32_t sum = 0;
            for (int i = 0; i < span; ++i) sum += codes[first + i];
            zeros[first / span] = static_cast<float>(-Format::kZero * sum) * factor;
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
    return factor;
}

template <class Format> void pack_floats(const float* numbers, uint8_t* to) {
#ifdef __AVX512BF16__
    if constexpr (Format::kStep == 2 * kLanes && Format::kVectors == 1) {
        uint16_t* packed = reinterpret_cast<uint16_t*>(to);
        for (int i = 0; i < kBlock; ++i) packed[i] = bfloat16_of(numbers[i]);
        return;
    }
#endif
    float* packed = reinterpret_cast<float*>(to);
    for (int first = 0; first < kBlock; first += Format::kStep) {
        for (int v = 0; v < Format::kVectors; ++v) {
            for (int lane = 0; lane < kLanes; ++lane) {
                *packed++ = numbers[first + lane * Format::kVectors + v] * Format::kFactor;
            }
        }
    }
}

template <class Format, int G>
void pack_row(const moereg_cpu_matrix& matrix, const void* row, int32_t format, float scale, void* packed) {
    constexpr int span = G == 0 ? kBlock : G;
    float numbers[kBlock];
    const auto widen_block = [&](int64_t begin) {
        const int64_t count = smaller(kBlock, matrix.columns - begin);
        if (count < kBlock) memset(numbers, 0, sizeof numbers);
        widen(row, format, begin, count, scale, numbers);
    };
    uint8_t* to = static_cast<uint8_t*>(packed);
    if constexpr (Format::kIsInteger) {
        float* factors = reinterpret_cast<float*>(to + factors_place<Format>(matrix.columns));
        float* group_zeros = reinterpret_cast<float*>(to + zeros_place<Format, G>(matrix.columns));
        uint32_t largest = 0;
        for (int64_t begin = 0; Format::kRoundsTokens && begin < matrix.columns; begin += kBlock) {
            widen_block(begin);
            const uint32_t largest_here = largest_magnitude(numbers);
            largest = largest_here > largest ? largest_here : largest;
        }
        float zeros[kBlock / kLeastGroup], all_zeros = 0;
        for (int64_t begin = 0; begin < matrix.columns; begin += kBlock) {
            widen_block(begin);
            if (!Format::kRoundsTokens) largest = largest_magnitude(numbers);
            const float factor = pack_integers<Format>(numbers, step_of<Format>(largest), to, span, zeros);
            for (int i = 0; i < packed_groups<Format, G>(); ++i) *factors++ = factor;
            if constexpr (Format::kIsBytes && G != 0) {
                memcpy(group_zeros, zeros, kBlock / span * sizeof *zeros);
                group_zeros += kBlock / span;
            } else if constexpr (Format::kIsBytes) {
                *group_zeros = all_zeros += zeros[0];
            }
            to += packed_bytes<Format>();
        }
    } else {
        for (int64_t begin = 0; begin < matrix.columns; begin += kBlock) {
            widen_block(begin);
            pack_floats<Format>(numbers, to);
            to += packed_bytes<Format>();
        }
    }
}

// --- products ---

// Scales of N rows, [begins[n], begins[n] + count) of an array, times the factors of a packed row's groups, to whole
// registers at to[n]. What the zeros of these groups add goes to sums[n].
template <bool Z, int N, int size, int zero_size>
MOEREG_INLINE void weigh_scales(
    const void* scales, int32_t format, const int64_t (&begins)[N], int64_t count, const float* factors,
    const float* group_zeros, const float (&zero_points)[N][zero_size], Floats (&sums)[N], float (&to)[N][size]) {
    const auto weigh = [&](int64_t i, auto decode, auto load_some) MOEREG_LAMBDA {
        const Floats factor = load_some(factors + i), zero = load_some(group_zeros + i);
        MOEREG_UNROLL
        for (int n = 0; n < N; ++n) {
            Floats scale = decode(begins[n] + i);
            const Floats weighed = multiply(scale, factor);
            memcpy(to[n] + i, &weighed, sizeof weighed);
            if constexpr (Z) scale = multiply(scale, load_some(zero_points[n] + i));
            sums[n] = multiply_add(zero, scale, sums[n]);
        }
    };
    const auto load_all = [](const float* from) MOEREG_LAMBDA { return load(from); };
    const float* numbers = static_cast<const float*>(scales);
    const uint8_t* codes = static_cast<const uint8_t*>(scales);
    int64_t i = 0;
    if (format == MOEREG_CPU_F32) {
        const auto decode = [&](int64_t place) MOEREG_LAMBDA { return load(numbers + place); };
        for (; i + kLanes <= count; i += kLanes) weigh(i, decode, load_all);
    } else if (format == MOEREG_CPU_E8M0) {
        const auto decode = [&](int64_t place) MOEREG_LAMBDA { return decode_e8m0(load_bytes(codes + place)); };
        for (; i + kLanes <= count; i += kLanes) weigh(i, decode, load_all);
    } else {
        const auto decode = [&](int64_t place) MOEREG_LAMBDA { return decode_e4m3(load_bytes(codes + place)); };
        for (; i + kLanes <= count; i += kLanes) weigh(i, decode, load_all);
    }
    const int64_t rest = count - i;
    if (rest == 0) return;
    const auto load_rest = [&](const float* from) MOEREG_LAMBDA { return load_first(from, rest); };
    const auto decode_rest = [&](int64_t place) MOEREG_LAMBDA {
        if (format == MOEREG_CPU_F32) return load_rest(numbers + place);
        float decoded[kLanes];
        decode_scales(scales, format, place, rest, decoded);
        return load_rest(decoded);
    };
    weigh(i, decode_rest, load_rest);
}

// How many rows of weights are read side by side for M packed rows: enough sums to hide an instruction's latency, and
// no more than there are registers for.
template <class Format, int M> constexpr int rows_at_once() {
    if (M == 1) return 4;
    if (Format::kIsInteger) return kLanes == 16 ? (M == 2 ? 4 : 2) : (M == 2 ? 2 : 1);
    return kLanes == 16 && Format::kVectors < 4 ? 4 : 2;
}

// Adds the products of one block of columns. NaN codes are looked for in `seen`. If a row is `weighed`, its scales are
// already times the factors of the only packed row.
template <class Format, int G, int M, int N, bool weighed = false>
MOEREG_INLINE void add_block(
    const uint8_t* const* weights, const uint8_t* const* packed, const float* const* factors,
    const float* const* scales, Floats (&sums)[M][N], Bits (&seen)[2]) {
    constexpr int vectors = Format::kVectors;
    // Lanes that share a scale in a step, and groups of a step; of whole blocks there is one scale.
    constexpr bool is_split = G != 0 && G < kBlock;
    constexpr int span = Format::kStep / kLanes, lanes = is_split ? G / span : kLanes;
    constexpr int groups = is_split ? Format::kStep / G : 0;
    if constexpr (Format::kIsInteger) {
        constexpr bool is_bytes = Format::kIsBytes;
        constexpr int parts = parts_of<Format>();
        Bits part[M][N], low[M][N];
        Floats scaled[M][N];
        MOEREG_UNROLL
        for (int m = 0; m < M; ++m) {
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) part[m][n] = low[m][n] = no_bits(), scaled[m][n] = zeros();
        }
        const auto sum_of_codes = [&](int m, int n) MOEREG_LAMBDA {
            if constexpr (parts == 2) return to_floats(combine_bytes(part[m][n], low[m][n]));
            return to_floats(part[m][n]);
        };
        MOEREG_UNROLL
        for (int step = 0; step < kSteps<Format>; ++step) {
            Bits codes[N][vectors];
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) {
                MOEREG_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    codes[n][v] = Format::decode(weights[n] + step * Format::kStepBytes, v);
                }
            }
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) {
                const uint8_t* place = packed[m] + step * vectors * parts * kBytes;
                MOEREG_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    const Bits input = in_register(load_bits(place + v * kBytes));
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        if constexpr (is_bytes) {
                            part[m][n] = in_register(multiply_bytes(part[m][n], codes[n][v], input));
                        } else {
                            part[m][n] = in_register(multiply_pairs(part[m][n], codes[n][v], input));
                        }
                    }
                    if constexpr (parts == 2) {
                        const Bits rest = in_register(load_bits(place + (vectors + v) * kBytes));
                        MOEREG_UNROLL
                        for (int n = 0; n < N; ++n) {
                            low[m][n] = in_register(multiply_bytes(low[m][n], codes[n][v], rest));
                        }
                    }
                }
                if constexpr (is_split) {
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        const Floats scale = spread<lanes>(scales[n] + step * groups);
                        auto& target = weighed ? sums[m][n] : scaled[m][n];
                        target = multiply_add(sum_of_codes(m, n), scale, target);
                        part[m][n] = low[m][n] = no_bits();
                    }
                }
            }
        }
        MOEREG_UNROLL
        for (int m = 0; m < M; ++m) {
            const Floats factor = weighed ? zeros() : all(*factors[m]);
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) {
                if constexpr (is_split && weighed) {
                    // Added above.
                } else if constexpr (weighed) {
                    sums[m][n] = multiply_add(sum_of_codes(m, n), all(*scales[n]), sums[m][n]);
                } else if constexpr (is_split) {
                    sums[m][n] = multiply_add(scaled[m][n], factor, sums[m][n]);
                } else {
                    const Floats both_factors = G == 0 ? factor : multiply(factor, all(*scales[n]));
                    sums[m][n] = multiply_add(sum_of_codes(m, n), both_factors, sums[m][n]);
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
            MOEREG_UNROLL
            for (int n = 0; n < N && Format::kHasNan; ++n) {
                const Bits codes = load_bits(weights[n] + step * Format::kStepBytes);
                seen[0] = larger_signed8(seen[0], codes);
                seen[1] = larger_unsigned8(seen[1], codes);
            }
            MOEREG_UNROLL
            for (int v = 0; v < vectors; ++v) {
                decltype(Format::decode(nullptr, 0)) values[N];
                MOEREG_UNROLL
                for (int n = 0; n < N; ++n) values[n] = Format::decode(weights[n] + step * Format::kStepBytes, v);
                MOEREG_UNROLL
                for (int m = 0; m < M; ++m) {
                    const Bits input = once(load_bits(packed[m] + (step * vectors + v) * kBytes));
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) target[m][n] = multiply_packed(target[m][n], values[n], input);
                }
            }
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) {
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

// The rows [begin, end) of an expert's matrix, in kStreams streams of `apart` rows.
template <class Format, int G> struct Tile {
    const moereg_cpu_matrix& matrix;
    int64_t expert, begin, end, next;
    int64_t apart = (end - begin + kStreams - 1) / kStreams;
    int64_t row_bytes = (matrix.columns * kBlockWeightBytes<Format> + kBlock - 1) / kBlock;
    int64_t groups = G == 0 ? 1 : (matrix.columns + G - 1) / G;
    int64_t rows_ahead = kAhead / row_bytes + 1;

    // How many rows ahead of a row of the first stream to prefetch. At a stream's end, the next product's begin.
    int64_t ahead_of(int64_t row) const {
        const int64_t past = row + rows_ahead - (begin + apart);
        if (past < 0) return rows_ahead;
        return past < apart && next >= 0 ? next + past - (expert * matrix.rows + row) : 0;
    }
};

// Whether products with one packed row multiply its factors by the scales first.
template <class Format, int G> constexpr bool weighs_scales = Format::kIsInteger && G != 0;

// The products of M packed rows with `count` rows from `first` on of each stream.
template <class Format, int G, bool Z, int M>
void multiply_rows(
    const Tile<Format, G>& tile, int64_t first, int64_t count, bool prefetches, const uint8_t* const* packed,
    float* out, int64_t out_stride) {
    constexpr int N = rows_at_once<Format, M>();
    constexpr int block_bytes = kBlockWeightBytes<Format>, per_block = G == 0 ? 0 : kBlock / G;
    constexpr int buffered = kSegment * kBlock / kLeastGroup;
    // Whether scales are multiplied by the factors of the packed row before they multiply sums.
    constexpr bool weighed = M == 1 && weighs_scales<Format, G>;
    const moereg_cpu_matrix& matrix = tile.matrix;
    const int64_t num_full = matrix.columns / kBlock, num_blocks = blocks_of(matrix.columns);
    const bool has_plain_scales = matrix.scale_format == MOEREG_CPU_F32;
    const int64_t scale_size = has_plain_scales ? 4 : 1, scale_row_bytes = tile.groups * scale_size;
    const int64_t first_row = tile.expert * matrix.rows;
    const uint8_t* first_weights = static_cast<const uint8_t*>(matrix.weight) + first_row * tile.row_bytes;
    const uint8_t* all_scales = static_cast<const uint8_t*>(matrix.scale);
    const uint8_t* weights[N];
    const float *scales[N] = {}, *factors[M], *group_zeros[M];
    int64_t rows[N], scale_places[N];
    float scale_buffer[N][G == 0 ? 1 : buffered], zero_points[N][Z ? buffered : 1];
    uint8_t copies[N][block_bytes];
    MOEREG_UNROLL
    for (int m = 0; m < M; ++m) {
        factors[m] = reinterpret_cast<const float*>(packed[m] + factors_place<Format>(matrix.columns));
        group_zeros[m] = reinterpret_cast<const float*>(packed[m] + zeros_place<Format, G>(matrix.columns));
    }
    for (int64_t place = first * kStreams; place < (first + count) * kStreams; place += N) {
        const int64_t top = place / kStreams, row = top + place % kStreams * tile.apart;
        if (row >= tile.end) continue;
        const int64_t ahead = prefetches ? tile.ahead_of(top) : 0, bytes_ahead = ahead * tile.row_bytes;
        Floats sums[M][N];
        Bits seen[2] = {no_bits(), no_bits()};
        MOEREG_UNROLL
        for (int m = 0; m < M; ++m) {
            MOEREG_UNROLL
            for (int n = 0; n < N; ++n) sums[m][n] = zeros();
        }
        for (int n = 0; n < N; ++n) {
            // A row that is not there is the first one again, and its result is dropped.
            rows[n] = row + n * tile.apart < tile.end ? row + n * tile.apart : row;
            weights[n] = first_weights + rows[n] * tile.row_bytes;
        }
        if (G != 0 && matrix.group_rows == 1) {
            for (int64_t line = 0; line < scale_row_bytes; line += 64) {
                MOEREG_UNROLL
                for (int n = 0; n < N; ++n) {
                    const uint8_t* from = all_scales + (first_row + rows[n] + ahead) * scale_row_bytes;
                    __builtin_prefetch(from + line, 0, 2);
                }
            }
        }
        for (int64_t begin = 0; begin < num_blocks;) {
            const bool is_partial = begin == num_full;
            const int64_t end = is_partial ? num_blocks : smaller(begin + kSegment, num_full);
            const int64_t first_group = begin * per_block;
            const int64_t num_groups = smaller(end * per_block, tile.groups) - first_group;
            for (int n = 0; n < N; ++n) {
                if (is_partial) {
                    // Copied, since nothing past the last row may be read.
                    memset(copies[n], 0, block_bytes);
                    memset(scale_buffer[n], 0, G == 0 ? 0 : per_block * sizeof(float));
                    memcpy(copies[n], weights[n], static_cast<size_t>(tile.row_bytes - num_full * block_bytes));
                    weights[n] = copies[n];
                }
                if constexpr (G != 0) {
                    scale_places[n] = scale_row_of(matrix, tile.expert, rows[n]) * tile.groups + first_group;
                    if constexpr (Z) {
                        const int64_t zero_row = first_row + rows[n];
                        find_zero_points(matrix, zero_row, tile.groups, first_group, num_groups, zero_points[n]);
                    }
                    if (weighed) {
                        scales[n] = scale_buffer[n];
                    } else if (has_plain_scales && !is_partial) {
                        scales[n] = static_cast<const float*>(matrix.scale) + scale_places[n];
                    } else {
                        const int32_t format = matrix.scale_format;
                        decode_scales(matrix.scale, format, scale_places[n], num_groups, scale_buffer[n]);
                        scales[n] = scale_buffer[n];
                    }
                }
            }
            if constexpr (weighed) {
                weigh_scales<Z>(
                    matrix.scale, matrix.scale_format, scale_places, num_groups, factors[0] + first_group,
                    group_zeros[0] + first_group, zero_points, sums[0], scale_buffer);
            }
            if constexpr (Format::kIsBytes && G != 0 && !weighed) {
                // What the zeros of all groups add.
                const auto add_zeros = [&](int64_t i, auto load_some) MOEREG_LAMBDA {
                    MOEREG_UNROLL
                    for (int m = 0; m < M; ++m) {
                        const Floats zero = load_some(group_zeros[m] + first_group + i);
                        MOEREG_UNROLL
                        for (int n = 0; n < N; ++n) {
                            Floats scale = load_some(scales[n] + i);
                            if constexpr (Z) scale = multiply(scale, load_some(zero_points[n] + i));
                            sums[m][n] = multiply_add(zero, scale, sums[m][n]);
                        }
                    }
                };
                int64_t i = 0;
                for (; i + kLanes <= num_groups; i += kLanes) {
                    add_zeros(i, [](const float* from) MOEREG_LAMBDA { return load(from); });
                }
                const int64_t rest = num_groups - i;
                if (rest > 0) add_zeros(i, [&](const float* from) MOEREG_LAMBDA { return load_first(from, rest); });
            }
            if constexpr (M == 1 && Format::kIsInteger) {
                // As many rows at a time as there are registers for.
                constexpr int side = kLanes == 16 ? N : 2;
                const uint8_t *block_weights[N], *block_inputs = packed[0] + begin * packed_bytes<Format>();
                const float *block_scales[N], *block_factors = factors[0] + begin;
                MOEREG_UNROLL
                for (int n = 0; n < N; ++n) block_weights[n] = weights[n], block_scales[n] = scales[n];
                for (int64_t block = begin; block < end; ++block) {
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        MOEREG_UNROLL
                        for (int line = 0; line < block_bytes; line += 64) {
                            __builtin_prefetch(block_weights[n] + bytes_ahead + line, 0, 2);
                        }
                    }
                    MOEREG_UNROLL
                    for (int n = 0; n < N; n += side) {
                        Floats side_sums[1][side];
                        MOEREG_UNROLL
                        for (int i = 0; i < side; ++i) side_sums[0][i] = sums[0][n + i];
                        add_block<Format, G, 1, side, weighed>(
                            block_weights + n, &block_inputs, &block_factors, block_scales + n, side_sums, seen);
                        MOEREG_UNROLL
                        for (int i = 0; i < side; ++i) sums[0][n + i] = side_sums[0][i];
                        // The next rows' loads stay behind, or registers are spilled.
                        asm volatile("" ::: "memory");
                    }
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) block_weights[n] += block_bytes, block_scales[n] += per_block;
                    block_inputs += packed_bytes<Format>(), ++block_factors;
                }
            } else {
                const uint8_t *block_weights[N], *block_inputs[M];
                const float *block_scales[N], *block_factors[M];
                MOEREG_UNROLL
                for (int n = 0; n < N; ++n) block_weights[n] = weights[n], block_scales[n] = scales[n];
                for (int64_t block = begin; block < end; ++block) {
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        MOEREG_UNROLL
                        for (int line = 0; line < block_bytes; line += 64) {
                            __builtin_prefetch(block_weights[n] + bytes_ahead + line, 0, 2);
                        }
                    }
                    MOEREG_UNROLL
                    for (int m = 0; m < M; ++m) {
                        block_inputs[m] = packed[m] + block * packed_bytes<Format>();
                        block_factors[m] = factors[m] + block * packed_groups<Format, G>();
                    }
                    add_block<Format, G, M, N>(block_weights, block_inputs, block_factors, block_scales, sums, seen);
                    MOEREG_UNROLL
                    for (int n = 0; n < N; ++n) {
                        block_weights[n] += block_bytes;
                        block_scales[n] += per_block;
                    }
                }
            }
            for (int n = 0; n < N; ++n) weights[n] += (end - begin) * block_bytes;
            begin = end;
        }
        bool may_have_nan = false;
        if constexpr (Format::kHasNan) may_have_nan = has_byte(seen[0], 0x7f) || has_byte(seen[1], 0xff);
        MOEREG_UNROLL
        for (int n = 0; n < N; ++n) {
            const int64_t row_here = row + n * tile.apart;
            if (row_here >= tile.end) break;
            float factor = row_factor(matrix, tile.expert, row_here);
            const int64_t whole_row = first_row + row_here;
            if (Format::kHasNan && may_have_nan) {
                const uint8_t* codes = static_cast<const uint8_t*>(matrix.weight) + whole_row * tile.row_bytes;
                if (has_nan_code(codes, tile.row_bytes)) factor = __builtin_nanf("");
            }
            if constexpr (Z && G == 0) find_zero_points(matrix, whole_row, 1, 0, 1, zero_points[n]);
            MOEREG_UNROLL
            for (int m = 0; m < M; ++m) {
                float sum = sum_of(sums[m][n]);
                if constexpr (Format::kIsBytes && G == 0) sum += *group_zeros[m] * (Z ? *zero_points[n] : 1.0f);
                out[m * out_stride + row_here - tile.begin] = sum * Format::kResult * factor;
            }
        }
    }
}

// Adds the products of M packed rows with N rows of weights over some blocks to sums[m * N + n].
template <class Format, int M, int N>
void multiply_span(
    const uint8_t* const* weights, const uint8_t* const* packed, int64_t begin, int64_t end, Floats* sums) {
    const uint8_t *block_weights[N], *block_inputs[M];
    Floats local[M][N];
    Bits seen[2];
    MOEREG_UNROLL
    for (int n = 0; n < N; ++n) block_weights[n] = weights[n];
    MOEREG_UNROLL
    for (int m = 0; m < M; ++m) {
        MOEREG_UNROLL
        for (int n = 0; n < N; ++n) local[m][n] = begin == 0 ? zeros() : sums[m * N + n];
    }
    for (int64_t block = begin; block < end; ++block) {
        MOEREG_UNROLL
        for (int m = 0; m < M; ++m) block_inputs[m] = packed[m] + block * packed_bytes<Format>();
        add_block<Format, 0, M, N>(block_weights, block_inputs, nullptr, nullptr, local, seen);
        MOEREG_UNROLL
        for (int n = 0; n < N; ++n) block_weights[n] += kBlockWeightBytes<Format>;
    }
    MOEREG_UNROLL
    for (int m = 0; m < M; ++m) {
        MOEREG_UNROLL
        for (int n = 0; n < N; ++n) sums[m * N + n] = local[m][n];
    }
}

// The same numbers as multiply_rows gives, for many packed rows of plain weights. Spans of kSpan blocks of all packed
// rows stay in the first cache, while kSpanRows rows of weights pass.
template <class Format>
void multiply_many(
    const Tile<Format, 0>& tile, const uint8_t* const* packed, int64_t num_rows, float* out, int64_t out_stride) {
    constexpr int M = 6, N = kLanes == 16 ? 4 : 2, block_bytes = kBlockWeightBytes<Format>;
    const moereg_cpu_matrix& matrix = tile.matrix;
    const int64_t num_blocks = blocks_of(matrix.columns), pieces = (num_rows + M - 1) / M;
    const int64_t most = (num_rows + pieces - 1) / pieces;
    const uint8_t* base = static_cast<const uint8_t*>(matrix.weight) + tile.expert * matrix.rows * tile.row_bytes;
    Floats sums[kMaxRows * kSpanRows];
    uint8_t copies[N][kSpan * block_bytes];
    for (int64_t top = tile.begin; top < tile.end; top += kSpanRows) {
        const int64_t count = smaller(kSpanRows, tile.end - top);
        // What is fetched at a row's end: the rows that come next, if there are any.
        const int64_t next = tile.next < 0 ? top : tile.next - tile.expert * matrix.rows;
        const int64_t next_top = top + count < tile.end ? top + count : next;
        for (int64_t begin = 0; begin < num_blocks; begin += kSpan) {
            const int64_t end = smaller(begin + kSpan, num_blocks), place = begin * block_bytes;
            const bool is_partial = end * kBlock > matrix.columns;
            for (int64_t row = 0; row < count; row += N) {
                const uint8_t* weights[N];
                for (int n = 0; n < N; ++n) {
                    // A row that is not there is the last one again, and its result is dropped.
                    weights[n] = base + (top + smaller(row + n, count - 1)) * tile.row_bytes + place;
                    const uint8_t* ahead = end < num_blocks ? weights[n] + kSpan * block_bytes
                                                            : base + (next_top + row + n) * tile.row_bytes;
                    for (int line = 0; line < kSpan * block_bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
                    if (is_partial) {
                        memset(copies[n], 0, sizeof copies[n]);
                        memcpy(copies[n], weights[n], static_cast<size_t>(tile.row_bytes - place));
                        weights[n] = copies[n];
                    }
                }
                for (int64_t m = 0; m < num_rows; m += most) {
                    Floats* to = sums + (row * num_rows + m * N);
                    const uint8_t* const* at = packed + m;
                    switch (smaller(most, num_rows - m)) {
                        case 1: multiply_span<Format, 1, N>(weights, at, begin, end, to); break;
                        case 2: multiply_span<Format, 2, N>(weights, at, begin, end, to); break;
                        case 3: multiply_span<Format, 3, N>(weights, at, begin, end, to); break;
                        case 4: multiply_span<Format, 4, N>(weights, at, begin, end, to); break;
                        case 5: multiply_span<Format, 5, N>(weights, at, begin, end, to); break;
                        default: multiply_span<Format, M, N>(weights, at, begin, end, to);
                    }
                }
            }
        }
        for (int64_t row = 0; row < count; ++row) {
            const Floats* from = sums + row / N * N * num_rows + row % N;
            for (int64_t m = 0; m < num_rows; ++m) {
                out[m * out_stride + top - tile.begin + row] = sum_of(from[m * N]) * Format::kResult;
            }
        }
    }
}

template <class Format, int G, bool Z>
void multiply(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, int64_t next,
    const void* const* packed, int64_t num_rows, float* out, int64_t out_stride) {
    const Tile<Format, G> tile{matrix, expert, begin, end, next};
    if constexpr (!Format::kIsInteger && !Format::kHasNan) {
        if (num_rows > 4) {
            multiply_many(tile, reinterpret_cast<const uint8_t* const*>(packed), num_rows, out, out_stride);
            return;
        }
    }
    // One row of each stream stays in the first cache while all packed rows pass.
    const int64_t count = num_rows > 4 ? 1 : tile.apart;
    for (int64_t row = begin; row < begin + tile.apart; row += count) {
        for (int64_t m = 0; m < num_rows; m += 4) {
            const uint8_t* const* at = reinterpret_cast<const uint8_t* const*>(packed) + m;
            float* to = out + m * out_stride;
            switch (num_rows - m) {
                case 1:
                    if (matrix.batch_invariant != 0 && weighs_scales<Format, G>) {
                        // One row alone would add in another order: it is multiplied twice, to the same place.
                        const uint8_t* const twice[] = {at[0], at[0]};
                        multiply_rows<Format, G, Z, 2>(tile, row, count, m == 0, twice, to, 0);
                    } else {
                        multiply_rows<Format, G, Z, 1>(tile, row, count, m == 0, at, to, out_stride);
                    }
                    break;
                case 2: multiply_rows<Format, G, Z, 2>(tile, row, count, m == 0, at, to, out_stride); break;
                case 3: multiply_rows<Format, G, Z, 3>(tile, row, count, m == 0, at, to, out_stride); break;
                default: multiply_rows<Format, G, Z, 4>(tile, row, count, m == 0, at, to, out_stride);
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
    bool rounds_tokens;
    int64_t (*packed_row_bytes)(int64_t);
    void (*pack)(const moereg_cpu_matrix&, const void*, int32_t, float, void*);
    void (*product)(
        const moereg_cpu_matrix&, int64_t, int64_t, int64_t, int64_t, const void* const*, int64_t, float*, int64_t);
};

template <class Format, int G, bool Z> constexpr Kernel kernel(int32_t format, bool rounds_tokens = false) {
    return {format, G, Z, rounds_tokens, packed_row_bytes<Format, G>, pack_row<Format, G>, multiply<Format, G, Z>};
}

constexpr Kernel kKernels[] = {
    kernel<BFloat16Weights, 0, false>(MOEREG_CPU_BF16),
    kernel<Float16, 0, false>(MOEREG_CPU_F16),
    kernel<Float32, 0, false>(MOEREG_CPU_F32),
    kernel<Int8, 0, false>(MOEREG_CPU_I8),
    kernel<Int8Tokens, 0, false>(MOEREG_CPU_I8, true),
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
            kernel.has_zero_points == (matrix.zero_point != nullptr) &&
            kernel.rounds_tokens == (matrix.rounds_tokens != 0)) {
            return &kernel;
        }
    }
    return nullptr;
}

int64_t packed_row_bytes(const moereg_cpu_matrix& matrix) {
    const Kernel* found = find_kernel(matrix);
    return found == nullptr ? 0 : found->packed_row_bytes(matrix.columns);
}

void pack(const moereg_cpu_matrix& matrix, const void* row, int32_t format, float factor, void* packed) {
    find_kernel(matrix)->pack(matrix, row, format, factor, packed);
}

void product(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, int64_t next,
    const void* const* packed, int64_t num_rows, float* out, int64_t out_stride) {
    find_kernel(matrix)->product(matrix, expert, begin, end, next, packed, num_rows, out, out_stride);
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
    return {name, packed_row_bytes, pack, product, activate, add_scaled, widen_floats, store_floats, read, nullptr};
}

}  // namespace
