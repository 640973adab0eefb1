// One register of floats, 32-bit or 16-bit integers or bytes, in the widest form that the translation unit's compiler
// options allow. All of it has internal linkage: see table.h.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define MOEREG_INLINE static inline __attribute__((always_inline))
// Arrays of registers are registers only if every loop over them is unrolled.
#define MOEREG_UNROLL _Pragma("GCC unroll 16")
#define MOEREG_LAMBDA __attribute__((always_inline))

namespace {

MOEREG_INLINE uint32_t load32(const void* from) {
    uint32_t bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Floats = __m512;
using Bits = __m512i;

MOEREG_INLINE Floats zeros() { return _mm512_setzero_ps(); }
MOEREG_INLINE Bits no_bits() { return _mm512_setzero_si512(); }
MOEREG_INLINE Floats all(float value) { return _mm512_set1_ps(value); }
MOEREG_INLINE Bits all_bits(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
MOEREG_INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
MOEREG_INLINE Bits load_bits(const void* from) { return _mm512_loadu_si512(from); }
MOEREG_INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
MOEREG_INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
MOEREG_INLINE Floats as_floats(Bits bits) { return _mm512_castsi512_ps(bits); }
MOEREG_INLINE Bits as_bits(Floats numbers) { return _mm512_castps_si512(numbers); }
MOEREG_INLINE Floats to_floats(Bits integers) { return _mm512_cvtepi32_ps(integers); }
MOEREG_INLINE Bits both(Bits a, Bits b) { return _mm512_and_si512(a, b); }
MOEREG_INLINE Bits either(Bits a, Bits b) { return _mm512_or_si512(a, b); }
MOEREG_INLINE Bits add32(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
MOEREG_INLINE Bits larger_signed32(Bits a, Bits b) { return _mm512_max_epi32(a, b); }
template <int N> MOEREG_INLINE Bits left32(Bits a) { return _mm512_slli_epi32(a, N); }
template <int N> MOEREG_INLINE Bits signed_right32(Bits a) { return _mm512_srai_epi32(a, N); }
template <int N> MOEREG_INLINE Bits left16(Bits a) { return _mm512_slli_epi16(a, N); }
template <int N> MOEREG_INLINE Bits right16(Bits a) { return _mm512_srli_epi16(a, N); }
template <int N> MOEREG_INLINE Bits signed_right16(Bits a) { return _mm512_srai_epi16(a, N); }
MOEREG_INLINE Bits larger_unsigned8(Bits a, Bits b) { return _mm512_max_epu8(a, b); }
MOEREG_INLINE Bits larger_signed8(Bits a, Bits b) { return _mm512_max_epi8(a, b); }
MOEREG_INLINE bool has_byte(Bits a, int byte) {
    return _mm512_cmpeq_epi8_mask(a, _mm512_set1_epi8(static_cast<char>(byte))) != 0;
}
MOEREG_INLINE Bits look_up(const uint8_t* table, Bits places) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), places);
}
// sum + a[2i] * b[2i] + a[2i+1] * b[2i+1], of 16-bit integers.
MOEREG_INLINE Bits multiply_pairs(Bits sum, Bits a, Bits b) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
// Sums of products of unsigned bytes of `a` and signed ones of `b`. Without VNNI they are pairs in 16 bits, which the
// caller keeps from overflowing.
MOEREG_INLINE Bits multiply_bytes(Bits sum, Bits a, Bits b) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(sum, a, b);
#else
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b));
#endif
}
// 256 * high + low of such sums, in 32 bits.
MOEREG_INLINE Bits combine_bytes(Bits high, Bits low) {
#ifdef __AVX512VNNI__
    return add32(left32<8>(high), low);
#else
    const Bits ones = _mm512_madd_epi16(low, _mm512_set1_epi16(1));
    return _mm512_add_epi32(_mm512_madd_epi16(high, _mm512_set1_epi16(256)), ones);
#endif
}
// kLanes bytes, each as a 32-bit integer.
MOEREG_INLINE Bits load_bytes(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
MOEREG_INLINE Floats load_halves(const void* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
// The first `count` of a register's numbers, and zeros.
MOEREG_INLINE Floats load_first(const float* from, int64_t count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}
// Each of the first kLanes / N numbers for N lanes.
template <int N> MOEREG_INLINE Floats spread(const float* from) {
    if constexpr (N >= kLanes) {
        return all(*from);
    } else if constexpr (N == 8) {
        const __m128i pair = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        const __m512 values = _mm512_castps128_ps512(_mm_castsi128_ps(pair));
        return _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), values);
    } else if constexpr (N == 4) {
        const __m512 values = _mm512_castps128_ps512(_mm_loadu_ps(from));
        return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0), values);
    } else {
        static_assert(N == 2, "no such group");
        const __m512 values = _mm512_castps256_ps512(_mm256_loadu_ps(from));
        return _mm512_permutexvar_ps(_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0), values);
    }
}
MOEREG_INLINE float sum_of(Floats a) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using Floats = __m256;
using Bits = __m256i;

MOEREG_INLINE Floats zeros() { return _mm256_setzero_ps(); }
MOEREG_INLINE Bits no_bits() { return _mm256_setzero_si256(); }
MOEREG_INLINE Floats all(float value) { return _mm256_set1_ps(value); }
MOEREG_INLINE Bits all_bits(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
MOEREG_INLINE Floats load(const float* from) { return _mm256_loadu_ps(from); }
MOEREG_INLINE Bits load_bits(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
MOEREG_INLINE Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
MOEREG_INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
MOEREG_INLINE Floats as_floats(Bits bits) { return _mm256_castsi256_ps(bits); }
MOEREG_INLINE Bits as_bits(Floats numbers) { return _mm256_castps_si256(numbers); }
MOEREG_INLINE Floats to_floats(Bits integers) { return _mm256_cvtepi32_ps(integers); }
MOEREG_INLINE Bits both(Bits a, Bits b) { return _mm256_and_si256(a, b); }
MOEREG_INLINE Bits either(Bits a, Bits b) { return _mm256_or_si256(a, b); }
MOEREG_INLINE Bits add32(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
MOEREG_INLINE Bits larger_signed32(Bits a, Bits b) { return _mm256_max_epi32(a, b); }
template <int N> MOEREG_INLINE Bits left32(Bits a) { return _mm256_slli_epi32(a, N); }
template <int N> MOEREG_INLINE Bits signed_right32(Bits a) { return _mm256_srai_epi32(a, N); }
template <int N> MOEREG_INLINE Bits left16(Bits a) { return _mm256_slli_epi16(a, N); }
template <int N> MOEREG_INLINE Bits right16(Bits a) { return _mm256_srli_epi16(a, N); }
template <int N> MOEREG_INLINE Bits signed_right16(Bits a) { return _mm256_srai_epi16(a, N); }
MOEREG_INLINE Bits larger_unsigned8(Bits a, Bits b) { return _mm256_max_epu8(a, b); }
MOEREG_INLINE Bits larger_signed8(Bits a, Bits b) { return _mm256_max_epi8(a, b); }
MOEREG_INLINE bool has_byte(Bits a, int byte) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(a, _mm256_set1_epi8(static_cast<char>(byte)))) != 0;
}
MOEREG_INLINE Bits look_up(const uint8_t* table, Bits places) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), places);
}
MOEREG_INLINE Bits multiply_pairs(Bits sum, Bits a, Bits b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
MOEREG_INLINE Bits multiply_bytes(Bits sum, Bits a, Bits b) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
}
MOEREG_INLINE Bits combine_bytes(Bits high, Bits low) {
    const Bits ones = _mm256_madd_epi16(low, _mm256_set1_epi16(1));
    return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), ones);
}
MOEREG_INLINE Bits load_bytes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
MOEREG_INLINE Floats load_halves(const void* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
MOEREG_INLINE Floats load_first(const float* from, int64_t count) {
    static constexpr int32_t kMask[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_maskload_ps(from, load_bits(kMask + kLanes - count));
}
template <int N> MOEREG_INLINE Floats spread(const float* from) {
    if constexpr (N >= kLanes) {
        return all(*from);
    } else if constexpr (N == 4) {
        double pair;
        memcpy(&pair, from, sizeof pair);
        return _mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(pair)), _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0));
    } else {
        static_assert(N == 2, "no such group");
        const __m256 values = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
        return _mm256_permutevar_ps(values, _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0));
    }
}
MOEREG_INLINE float sum_of(Floats a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#else

// The compiler's own vectors, which it maps to whatever the processor has. Pairs of 16-bit integers are in the order of
// a little-endian processor.
constexpr int kLanes = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef int32_t Signed __attribute__((vector_size(32)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef int16_t SignedShorts __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef int8_t SignedBytes __attribute__((vector_size(32)));

MOEREG_INLINE Floats zeros() { return Floats{}; }
MOEREG_INLINE Bits no_bits() { return Bits{}; }
MOEREG_INLINE Floats all(float value) { return value - Floats{}; }
MOEREG_INLINE Bits all_bits(uint32_t value) { return value - Bits{}; }
MOEREG_INLINE Bits load_bits(const void* from) {
    Bits bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}
MOEREG_INLINE Floats as_floats(Bits bits) { return reinterpret_cast<Floats>(bits); }
MOEREG_INLINE Bits as_bits(Floats numbers) { return reinterpret_cast<Bits>(numbers); }
MOEREG_INLINE Floats load(const float* from) { return as_floats(load_bits(from)); }
MOEREG_INLINE Floats multiply(Floats a, Floats b) { return a * b; }
MOEREG_INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return a * b + sum; }
MOEREG_INLINE Floats to_floats(Bits integers) {
    return __builtin_convertvector(reinterpret_cast<Signed>(integers), Floats);
}
MOEREG_INLINE Bits both(Bits a, Bits b) { return a & b; }
MOEREG_INLINE Bits either(Bits a, Bits b) { return a | b; }
MOEREG_INLINE Bits add32(Bits a, Bits b) { return a + b; }
MOEREG_INLINE Bits larger_signed32(Bits a, Bits b) {
    const Signed one = reinterpret_cast<Signed>(a), other = reinterpret_cast<Signed>(b);
    return reinterpret_cast<Bits>(one > other ? one : other);
}
template <int N> MOEREG_INLINE Bits left32(Bits a) { return a << N; }
template <int N> MOEREG_INLINE Bits signed_right32(Bits a) {
    return reinterpret_cast<Bits>(reinterpret_cast<Signed>(a) >> N);
}
template <int N> MOEREG_INLINE Bits left16(Bits a) {
    return reinterpret_cast<Bits>(reinterpret_cast<Shorts>(a) << N);
}
template <int N> MOEREG_INLINE Bits right16(Bits a) {
    return reinterpret_cast<Bits>(reinterpret_cast<Shorts>(a) >> N);
}
template <int N> MOEREG_INLINE Bits signed_right16(Bits a) {
    return reinterpret_cast<Bits>(reinterpret_cast<SignedShorts>(a) >> N);
}
MOEREG_INLINE Bits larger_unsigned8(Bits a, Bits b) {
    const Bytes one = reinterpret_cast<Bytes>(a), other = reinterpret_cast<Bytes>(b);
    return reinterpret_cast<Bits>(one > other ? one : other);
}
MOEREG_INLINE Bits larger_signed8(Bits a, Bits b) {
    const SignedBytes one = reinterpret_cast<SignedBytes>(a), other = reinterpret_cast<SignedBytes>(b);
    return reinterpret_cast<Bits>(one > other ? one : other);
}
MOEREG_INLINE bool has_byte(Bits a, int byte) {
    bool found = false;
    for (int lane = 0; lane < 4 * kLanes; ++lane) found |= reinterpret_cast<Bytes>(a)[lane] == (byte & 255);
    return found;
}
MOEREG_INLINE Bits look_up(const uint8_t* table, Bits places) {
    Bytes found;
    for (int lane = 0; lane < 4 * kLanes; ++lane) found[lane] = table[reinterpret_cast<Bytes>(places)[lane] & 15];
    return reinterpret_cast<Bits>(found);
}
MOEREG_INLINE Bits multiply_pairs(Bits sum, Bits a, Bits b) {
    const Bits low = signed_right32<16>(left32<16>(a)) * signed_right32<16>(left32<16>(b));
    return sum + low + signed_right32<16>(a) * signed_right32<16>(b);
}
MOEREG_INLINE Bits multiply_bytes(Bits sum, Bits a, Bits b) {
    const Shorts b_even = reinterpret_cast<Shorts>(signed_right16<8>(left16<8>(b)));
    const Shorts b_odd = reinterpret_cast<Shorts>(signed_right16<8>(b));
    const Shorts even = reinterpret_cast<Shorts>(a & 0x00ff00ff) * b_even;
    const Shorts odd = reinterpret_cast<Shorts>(right16<8>(a)) * b_odd;
    return reinterpret_cast<Bits>(reinterpret_cast<Shorts>(sum) + even + odd);
}
MOEREG_INLINE Bits combine_bytes(Bits high, Bits low) {
    const Bits even = left32<8>(signed_right32<16>(left32<16>(high))) + signed_right32<16>(left32<16>(low));
    return even + left32<8>(signed_right32<16>(high)) + signed_right32<16>(low);
}
MOEREG_INLINE Bits load_bytes(const uint8_t* from) {
    Bits bits;
    for (int lane = 0; lane < kLanes; ++lane) bits[lane] = from[lane];
    return bits;
}
MOEREG_INLINE Floats load_halves(const void* from) {
    typedef uint16_t EightShorts __attribute__((vector_size(16)));
    EightShorts halves;
    memcpy(&halves, from, sizeof halves);
    const Bits bits = __builtin_convertvector(halves, Bits), magnitude = bits & 0x7fff;
    // Exponents differ by 112; multiplying also normalizes subnormals. Infinity and NaN keep their mantissa.
    const Bits scaled = reinterpret_cast<Bits>(as_floats(magnitude << 13) * 0x1p112f);
    const Bits special = reinterpret_cast<Bits>(magnitude > 0x7bff) & 0x7f800000;
    return as_floats(scaled | special | (bits & 0x8000) << 16);
}
MOEREG_INLINE Floats load_first(const float* from, int64_t count) {
    Floats values{};
    for (int lane = 0; lane < count; ++lane) values[lane] = from[lane];
    return values;
}
template <int N> MOEREG_INLINE Floats spread(const float* from) {
    Floats values;
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = from[lane / N];
    return values;
}
MOEREG_INLINE float sum_of(Floats a) {
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

#endif

// Computes this here and once: compilers else load inputs for each of the instructions that read them, or keep so many
// for later that registers are spilled.
MOEREG_INLINE Bits in_register(Bits bits) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(bits));
#elif defined(__AVX2__)
    asm volatile("" : "+x"(bits));
#endif
    return bits;
}

// Loads once what several instructions read, which compilers else load for each of them.
MOEREG_INLINE Bits once(Bits bits) {
#if defined(__AVX512F__)
    asm ("" : "+v"(bits));
#elif defined(__AVX2__)
    asm ("" : "+x"(bits));
#endif
    return bits;
}

constexpr int kBytes = 4 * kLanes;
constexpr int kShorts = 2 * kLanes;

MOEREG_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

MOEREG_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace
