// Conversions of single numbers, in loops that compilers vectorize, and the activation functions.
#pragma once

#include "table.h"
#include "vectors.h"

namespace {

using moereg_cpu::kBlock;

MOEREG_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MOEREG_INLINE int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }
MOEREG_INLINE int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

MOEREG_INLINE float float_of_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff, sign = static_cast<uint32_t>(half & 0x8000) << 16;
    // Exponents differ by 112; multiplying also normalizes subnormals.
    const uint32_t scaled = bits_of(float_of(magnitude << 13) * 0x1p112f);
    return float_of(scaled | (magnitude > 0x7bff ? 0x7f800000u : 0u) | sign);
}

MOEREG_INLINE uint16_t bfloat16_of(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

MOEREG_INLINE uint16_t half_of(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    // Subnormal halves are multiples of 2^-24: adding 0.5 rounds to one, and leaves the multiple in the low bits.
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t usual = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t finite = magnitude < 113u << 23 ? small : usual;
    const uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return static_cast<uint16_t>((magnitude >= 0x47800000 ? large : finite) | sign);
}

// Numbers [begin, begin + count) of a row times a factor, as floats.
MOEREG_INLINE void widen(
    const void* row, int32_t format, int64_t begin, int64_t count, float factor, float* __restrict to) {
    if (format == MOEREG_CPU_F32) {
        const float* from = static_cast<const float*>(row) + begin;
        for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
    } else if (format == MOEREG_CPU_BF16) {
        const uint16_t* from = static_cast<const uint16_t*>(row) + begin;
        for (int64_t i = 0; i < count; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16) * factor;
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(row) + begin;
        for (int64_t i = 0; i < count; ++i) to[i] = float_of_half(from[i]) * factor;
    }
}

void widen_floats(const void* from, int32_t format, int64_t begin, int64_t count, float* to) {
    widen(from, format, begin, count, 1.0f, to);
}

[[maybe_unused]] void store_floats(const float* from, int32_t format, void* to, int64_t count) {
    if (format == MOEREG_CPU_F32) {
        memcpy(to, from, static_cast<size_t>(count) * sizeof *from);
    } else if (format == MOEREG_CPU_BF16) {
        uint16_t* rounded = static_cast<uint16_t*>(to);
        for (int64_t i = 0; i < count; ++i) rounded[i] = bfloat16_of(from[i]);
    } else {
        uint16_t* rounded = static_cast<uint16_t*>(to);
        for (int64_t i = 0; i < count; ++i) rounded[i] = half_of(from[i]);
    }
}

// e^x within 2 units in the last place, from -87 to 88; NaN stays NaN.
MOEREG_INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    // The sum's low bits hold the nearest integer.
    const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * float_of((bits_of(shifted) - 0x4b400000 + 127) << 23);
}

MOEREG_INLINE float sigmoid(float x) {
    const float value = 1.0f / (1.0f + exponential(-x));
    // Else the product with a gate of -1e38 would not be 0.
    return x < -87.0f ? 0.0f : value;
}

// Abramowitz and Stegun 7.1.26, within 2e-7.
MOEREG_INLINE float error_function(float x) {
    const float magnitude = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * magnitude);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float value = 1.0f - p * t * exponential(-magnitude * magnitude);
    return x < 0 ? -value : value;
}

// cap * tanh(x / cap), within 2e-7 of itself: near 0, where 1 - 2 * tail loses all digits, by a polynomial, a least
// squares fit of relative errors up to 0.6.
MOEREG_INLINE float softcap(float x, float cap) {
    const float z = x / cap, square = z * z, tail = sigmoid(z < 0 ? 2.0f * z : -2.0f * z);
    float p = 0.0156126327f;
    p = p * square - 0.0522118067f;
    p = p * square + 0.133131167f;
    p = p * square - 0.333325975f;
    const float far = z < 0 ? 2.0f * tail - 1.0f : 1.0f - 2.0f * tail;
    return cap * (square < 0.36f ? z + z * square * p : far);
}

template <int kind> MOEREG_INLINE void activate_gates(
    const moereg_cpu_layer& layer, float* __restrict gate, const float* __restrict up, int64_t count) {
    const float limit = layer.has_limit ? layer.limit : __builtin_inff(), alpha = layer.alpha, beta = layer.beta;
    const float gate_softcap = layer.gate_softcap, up_softcap = layer.up_softcap;
    for (int64_t i = 0; i < count; ++i) {
        float g = gate[i], u = up[i];
        // Comparisons that keep NaN.
        g = g > limit ? limit : g;
        u = u > limit ? limit : u;
        u = u < -limit ? -limit : u;
        float value;
        if (kind == MOEREG_CPU_SIGMOID_GATE) {
            value = g * sigmoid(alpha * g);
        } else if (kind == MOEREG_CPU_GELU) {
            value = 0.5f * g * (1.0f + error_function(g * 0.70710678f));
        } else if (kind == MOEREG_CPU_SITU) {
            value = softcap(g, gate_softcap) * sigmoid(g);
            u = up_softcap > 0 ? softcap(u, up_softcap) : u;
        } else {
            value = g * sigmoid(1.59576912f * (g + 0.044715f * g * g * g));
        }
        gate[i] = value * (u + beta);
    }
}

[[maybe_unused]] void activate(const moereg_cpu_layer& layer, float* gate, const float* up, int64_t count) {
    if (layer.activation == MOEREG_CPU_SIGMOID_GATE) {
        activate_gates<MOEREG_CPU_SIGMOID_GATE>(layer, gate, up, count);
    } else if (layer.activation == MOEREG_CPU_GELU) {
        activate_gates<MOEREG_CPU_GELU>(layer, gate, up, count);
    } else if (layer.activation == MOEREG_CPU_GELU_TANH) {
        activate_gates<MOEREG_CPU_GELU_TANH>(layer, gate, up, count);
    } else if (layer.activation == MOEREG_CPU_SITU) {
        activate_gates<MOEREG_CPU_SITU>(layer, gate, up, count);
    } else {
        for (int64_t i = 0; i < count; ++i) gate[i] = gate[i] < 0 ? 0.0f : gate[i] * gate[i];
    }
}

[[maybe_unused]] void add_scaled(float* __restrict sum, const float* __restrict row, float weight, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sum[i] += weight * row[i];
}

}  // namespace
