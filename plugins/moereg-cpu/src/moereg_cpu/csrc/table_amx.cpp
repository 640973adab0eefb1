// Products of many rows by AMX, in bfloat16 with sums in fp32, for layers in bfloat16. Everything else is the table for
// AVX512-BF16's.
//
// A tile of weights is 16 rows of 32 columns, in the order of memory but decoded to bfloat16 into a buffer in the first
// cache. The other operand holds pairs of columns of 16 rows of activations, which is why these are packed in panels
// of 16 rows: per 32 columns, [pair][row][2]. Sums are [row of weights][row of activations], of which two neighbors
// are a pair of the next product.
#include "scales.h"

namespace {

using moereg_cpu::kPanelColumns;
using moereg_cpu::kPanelRows;
using moereg_cpu::kPanelSize;

// A step is 32 columns. So many are decoded at a time at most, of 32 rows of weights: 32 KiB.
constexpr int64_t kStep = 32, kMostSteps = 16;
constexpr int64_t kStepBytes = kStep * kPanelRows * 2;

struct Weights {
    alignas(64) uint16_t steps[kMostSteps][kPanelColumns][kStep];
};

MOEREG_INLINE int64_t steps_of(int64_t columns) { return (columns + kStep - 1) / kStep; }
MOEREG_INLINE bool is_4_bit(const moereg_cpu_matrix& matrix) {
    return matrix.format == MOEREG_CPU_U4 || matrix.format == MOEREG_CPU_E2M1;
}
MOEREG_INLINE __m512i rounded(Floats high, Floats low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Two 16-bit numbers of each lane, out of a register that holds all firsts and then all seconds; and the reverse.
MOEREG_INLINE __m512i interleaved(__m512i halves) {
    static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(load_bits(kOrder), halves);
}
MOEREG_INLINE __m512i evens_then_odds(__m512i numbers) {
    static constexpr uint16_t kOrder[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                            1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    return _mm512_permutexvar_epi16(load_bits(kOrder), numbers);
}

// Transposes 16 registers of 16 numbers.
MOEREG_INLINE void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16];
    MOEREG_UNROLL
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Lane group g of rows[4 * i + j] is column 4 * g + j of rows 4 * i to 4 * i + 3.
    MOEREG_UNROLL
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    MOEREG_UNROLL
    for (int j = 0; j < 4; ++j) {
        const __m512i low = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
        const __m512i high = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
        pairs[j] = _mm512_shuffle_i32x4(low, high, 0x88);
        pairs[4 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        pairs[8 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
        pairs[12 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
    MOEREG_UNROLL
    for (int i = 0; i < 16; ++i) rows[i] = pairs[i];
}

// --- panels ---

void pack_panel(
    const moereg_cpu_matrix& matrix, const void* const* rows, const float* factors, int64_t count, void* panel) {
    char* to = static_cast<char*>(panel);
    for (int64_t begin = 0; begin < matrix.columns; begin += kStep, to += kStepBytes) {
        const int64_t columns = smaller(kStep, matrix.columns - begin);
        const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
        __m512i pairs[kPanelRows];
        MOEREG_UNROLL
        for (int m = 0; m < kPanelRows; ++m) {
            pairs[m] = no_bits();
            if (m >= count) continue;
            pairs[m] = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(rows[m]) + begin);
            if (factors != nullptr) {
                const Floats factor = all(factors[m]);
                const Floats even = multiply(as_floats(left32<16>(pairs[m])), factor);
                const Floats odd = multiply(as_floats(both(pairs[m], all_bits(0xffff0000))), factor);
                pairs[m] = interleaved(rounded(odd, even));
            }
            if (is_4_bit(matrix)) pairs[m] = evens_then_odds(pairs[m]);
        }
        transpose(pairs);
        MOEREG_UNROLL
        for (int pair = 0; pair < kPanelRows; ++pair) _mm512_storeu_si512(to + pair * 64, pairs[pair]);
    }
}

void pack_columns(const moereg_cpu_matrix& matrix, const float* numbers, int64_t begin, void* panel) {
    char* to = static_cast<char*>(panel) + begin / kStep * kStepBytes;
    for (int pair = 0; pair < kPanelRows; ++pair) {
        int first = 2 * pair, apart = 1;
        if (is_4_bit(matrix)) first = pair < 8 ? 4 * pair : 4 * (pair - 8) + 1, apart = 2;
        const float* from = numbers + first * kPanelRows;
        const __m512i halves = rounded(load(from + apart * kPanelRows), load(from));
        _mm512_storeu_si512(to + pair * 64, interleaved(halves));
    }
}

void turn(const float* from, float* to) {
    for (int64_t half = 0; half < kPanelColumns; half += kPanelRows) {
        __m512i rows[kPanelRows];
        MOEREG_UNROLL
        for (int n = 0; n < kPanelRows; ++n) rows[n] = load_bits(from + (half + n) * kPanelRows);
        transpose(rows);
        MOEREG_UNROLL
        for (int m = 0; m < kPanelRows; ++m) _mm512_storeu_si512(to + m * kPanelColumns + half, rows[m]);
    }
}

// --- weights ---

// One row's weights of a block.
struct Row {
    const uint8_t* codes;
    const float* scales;       // of each group of the block
    const float* zero_points;  // likewise, or NULL
};

MOEREG_INLINE Floats decode_i8(const uint8_t* from) {
    return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// The value of each code, times a scale, as bfloat16.
MOEREG_INLINE __m256i values_of(Floats values, float scale) {
    return (__m256i)_mm512_cvtneps_pbh(multiply(values, all(scale)));
}

template <int32_t F> constexpr int64_t step_bytes() {
    if (F == MOEREG_CPU_BF16) return 2 * kStep;
    return F == MOEREG_CPU_U4 || F == MOEREG_CPU_E2M1 ? kStep / 2 : kStep;
}

// Decodes `count` steps of a row in groups of G columns, to each step's place in a block. It begins with a group.
template <int32_t F, int G>
MOEREG_INLINE void decode_steps(const Row& row, int64_t count, uint16_t* to) {
    static constexpr float kIntegers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static constexpr float kFloats[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    const Floats values = load(F == MOEREG_CPU_U4 ? kIntegers : kFloats);
    const Floats centered = _mm512_sub_ps(values, all(F == MOEREG_CPU_U4 ? 8.0f : 0.0f));
    const auto table_of_group = [&](int64_t group) MOEREG_LAMBDA {
        Floats here = centered;
        if (row.zero_points != nullptr) here = _mm512_sub_ps(values, all(row.zero_points[group]));
        return values_of(here, G == 0 ? 1.0f : row.scales[group]);
    };
    __m512i table = no_bits();
    for (int64_t step = 0; step < count; ++step, to += kPanelColumns * kStep) {
        const uint8_t* from = row.codes + step * step_bytes<F>();
        __m512i decoded;
        if constexpr (F == MOEREG_CPU_BF16) {
            decoded = load_bits(from);
        } else if constexpr (F == MOEREG_CPU_I8) {
            decoded = rounded(decode_i8(from + kLanes), decode_i8(from));
        } else if constexpr (F == MOEREG_CPU_E4M3) {
            const Floats scale = all(G == 0 ? 1.0f : row.scales[G == 0 ? 0 : step * kStep / G]);
            const Floats low = decode_e4m3(load_bytes(from)), high = decode_e4m3(load_bytes(from + kLanes));
            decoded = rounded(multiply(high, scale), multiply(low, scale));
        } else {
            const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            // Even columns are low nibbles, odd ones high. A look-up reads the lowest 5 bits.
            __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
            if constexpr (G == 16) {
                // Of a step's two groups, the second is looked up in the second half of the table.
                const __m512i first = _mm512_castsi256_si512(table_of_group(2 * step));
                table = _mm512_inserti64x4(first, table_of_group(2 * step + 1), 1);
                constexpr int64_t bit = 0x0010001000100010;
                const __m512i second = _mm512_set_epi64(bit, bit, 0, 0, bit, bit, 0, 0);
                codes = either(both(codes, all_bits(0x000f000f)), second);
            } else if (G == 0 ? step == 0 : step * kStep % (G == 0 ? 1 : G) == 0) {
                table = _mm512_broadcast_i64x4(table_of_group(G == 0 ? 0 : step * kStep / (G == 0 ? 1 : G)));
            }
            decoded = _mm512_permutexvar_epi16(codes, table);
        }
        _mm512_store_si512(to, decoded);
    }
}

// What to prefetch while a block is used: the next one, line by line, as memory delivers it.
struct Ahead {
    const uint8_t* from;  // or NULL
    int64_t row_bytes, lines_of_row;
    int64_t row = 0, line = 0;

    MOEREG_LAMBDA void fetch(int64_t count) {
        for (; count > 0 && from != nullptr && row < kPanelColumns; --count) {
            __builtin_prefetch(from + row * row_bytes + line * 64, 0, 2);
            if (++line == lines_of_row) line = 0, ++row;
        }
    }
};

// Decodes the steps [begin, end) of a matrix's rows [top, top + count); rows beyond repeat the last one.
template <int32_t F, int G>
void decode_block(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t top, int64_t count, int64_t begin, int64_t end,
    Ahead& ahead, Weights& weights) {
    constexpr int64_t bytes = step_bytes<F>();
    constexpr int64_t group = G == 0 ? INT64_MAX / 4 : G;
    const int64_t row_bytes = (matrix.columns * bytes + kStep - 1) / kStep;
    const int64_t groups = G == 0 ? 1 : (matrix.columns + group - 1) / group, first_group = begin * kStep / group;
    const int64_t num_groups = G == 0 ? 1 : smaller((end * kStep + group - 1) / group, groups) - first_group;
    const bool is_partial = end * kStep > matrix.columns;
    const uint8_t* all_codes = static_cast<const uint8_t*>(matrix.weight);
    float scales[kMostSteps * 2 + kLanes], zero_points[kMostSteps * 2];
    for (int64_t n = 0; n < kPanelColumns; ++n) {
        const int64_t row = top + smaller(n, count - 1), place = expert * matrix.rows + row;
        Row one{all_codes + place * row_bytes + begin * bytes, scales, nullptr};
        ahead.fetch(ahead.lines_of_row / 2);
        if constexpr (G != 0) {
            const int64_t from = scale_row_of(matrix, expert, row) * groups + first_group;
            if (G > 16 && matrix.scale_format == MOEREG_CPU_F32) {
                one.scales = static_cast<const float*>(matrix.scale) + from;
            } else {
                decode_scales(matrix.scale, matrix.scale_format, from, num_groups, scales);
                // A step of two groups, the second of which no column has.
                if (num_groups < 2 * kMostSteps) scales[num_groups] = 0;
            }
        }
        if (matrix.zero_point != nullptr) {
            find_zero_points(matrix, place, groups, first_group, num_groups, zero_points);
            one.zero_points = zero_points;
        }
        const int64_t num_full = end - begin - is_partial;
        decode_steps<F, G>(one, num_full, weights.steps[0][n]);
        if (is_partial) {
            uint8_t copy[2 * kStep] = {};
            memcpy(copy, one.codes + num_full * bytes, static_cast<size_t>(row_bytes - (end - 1) * bytes));
            one.codes = copy;
            const int64_t skipped = num_full * kStep / group;
            one.scales += skipped;
            if (one.zero_points != nullptr) one.zero_points += skipped;
            decode_steps<F, G>(one, 1, weights.steps[num_full][n]);
        }
    }
}

// --- products ---

// Compilers do not know what the instructions that load tiles read.
MOEREG_INLINE void memory_is_read() { asm volatile("" ::: "memory"); }

// The tile registers, configured as 16 rows of 64 bytes each; afterwards as they were before, without their contents.
class TileRegisters {
  public:
    TileRegisters() {
        _tile_storeconfig(&before_);
        Config config = {};
        config.palette = 1;
        for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
        load_config(config);
    }
    ~TileRegisters() { load_config(before_); }

  private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static void load_config(const Config& config) {
        memory_is_read();
        _tile_loadconfig(&config);
    }

    Config before_;
};

// Adds the products of a block with one or two panels to out, which is loaded if the block is not the first.
template <bool two>
MOEREG_INLINE void multiply_block(
    const Weights& weights, int64_t steps, const uint8_t* panels, int64_t panel_bytes, bool is_first, Ahead& ahead,
    int64_t lines, float* out) {
    float* second = out + kPanelSize;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, out, 64);
        _tile_loadd(1, out + 256, 64);
        if constexpr (two) {
            _tile_loadd(2, second, 64);
            _tile_loadd(3, second + 256, 64);
        }
    }
    for (int64_t step = 0; step < steps; ++step) {
        ahead.fetch(lines);
        _tile_loadd(4, weights.steps[step][0], 64);
        _tile_loadd(6, panels + step * kStepBytes, 64);
        _tile_loadd(5, weights.steps[step][kPanelRows], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (two) {
            _tile_loadd(7, panels + panel_bytes + step * kStepBytes, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + 256, 64);
    if constexpr (two) {
        _tile_stored(2, second, 64);
        _tile_stored(3, second + 256, 64);
    }
}

template <int32_t F, int G>
void multiply(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, int64_t next, const uint8_t* panels,
    int64_t num_panels, float* out) {
    const TileRegisters registers;
    const int64_t num_steps = steps_of(matrix.columns), bytes = num_steps * kStepBytes;
    const int64_t row_bytes = (matrix.columns * step_bytes<F>() + kStep - 1) / kStep;
    constexpr int64_t block_steps = step_bytes<F>() < kStep ? kMostSteps : kMostSteps / 2;
    constexpr int64_t lines = block_steps * step_bytes<F>() / 64;
    Weights weights;
    for (int64_t step = 0; step < num_steps; step += block_steps) {
        const int64_t stop = smaller(step + block_steps, num_steps);
        Ahead ahead{static_cast<const uint8_t*>(matrix.weight), row_bytes, lines};
        if (stop < num_steps) {
            ahead.from += (expert * matrix.rows + begin) * row_bytes + stop * step_bytes<F>();
        } else {
            ahead.from = next < 0 ? nullptr : ahead.from + next * row_bytes;
        }
        decode_block<F, G>(matrix, expert, begin, end - begin, step, stop, ahead, weights);
        memory_is_read();
        // The other half of the lines.
        const int64_t lines_of_step = lines * kPanelColumns / (num_panels + 1) / block_steps + 1;
        for (int64_t panel = 0; panel < num_panels; panel += 2) {
            const uint8_t* from = panels + panel * bytes + step * kStepBytes;
            float* to = out + panel * kPanelSize;
            if (panel + 1 < num_panels) {
                multiply_block<true>(weights, stop - step, from, bytes, step == 0, ahead, lines_of_step, to);
            } else {
                multiply_block<false>(weights, stop - step, from, bytes, step == 0, ahead, lines_of_step, to);
            }
        }
    }
    const bool has_row_scales = matrix.scale_2 != nullptr || (matrix.scale != nullptr && matrix.group_columns == 0);
    if (!has_row_scales && matrix.bias == nullptr) return;
    for (int64_t n = 0; n < end - begin; ++n) {
        const Floats factor = all(row_factor(matrix, expert, begin + n));
        float bias = 0;
        if (matrix.bias != nullptr) {
            widen_floats(matrix.bias, matrix.bias_format, expert * matrix.rows + begin + n, 1, &bias);
        }
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            float* sums = out + panel * kPanelSize + n * kPanelRows;
            const Floats result = multiply_add(load(sums), factor, all(bias));
            memcpy(sums, &result, sizeof result);
        }
    }
}

static_assert(kStep == kPanelColumns, "a step of a panel is what a product of gates writes");

using Product = decltype(moereg_cpu::Panels::product);

Product product_of(const moereg_cpu_matrix& matrix) {
    const int32_t group = matrix.group_columns;
    switch (matrix.format) {
        case MOEREG_CPU_BF16: return multiply<MOEREG_CPU_BF16, 0>;
        case MOEREG_CPU_I8: return multiply<MOEREG_CPU_I8, 0>;
        case MOEREG_CPU_E4M3:
            if (group == 0) return multiply<MOEREG_CPU_E4M3, 0>;
            return group == 32 ? multiply<MOEREG_CPU_E4M3, 32> : multiply<MOEREG_CPU_E4M3, 128>;
        case MOEREG_CPU_E2M1: return group == 16 ? multiply<MOEREG_CPU_E2M1, 16> : multiply<MOEREG_CPU_E2M1, 32>;
        case MOEREG_CPU_U4:
            if (group == 0) return multiply<MOEREG_CPU_U4, 0>;
            if (group == 32) return multiply<MOEREG_CPU_U4, 32>;
            return group == 64 ? multiply<MOEREG_CPU_U4, 64> : multiply<MOEREG_CPU_U4, 128>;
        default: return nullptr;
    }
}

int64_t panel_bytes(const moereg_cpu_matrix& matrix, int32_t format) {
    if (product_of(matrix) == nullptr || matrix.rounds_tokens != 0 || format != MOEREG_CPU_BF16) return 0;
    return steps_of(matrix.columns) * kStepBytes;
}

void product(
    const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, int64_t next, const uint8_t* panels,
    int64_t num_panels, float* out) {
    product_of(matrix)(matrix, expert, begin, end, next, panels, num_panels, out);
}

// A constant: nothing of this unit may run while the library is loaded, by processors that lack its instructions.
constexpr moereg_cpu::Panels kPanels = {panel_bytes, pack_panel, pack_columns, product, turn};

}  // namespace

const moereg_cpu::Panels moereg_cpu::kAmxPanels = kPanels;
