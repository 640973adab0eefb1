// Runs a layer: sorts routes, multiplies by gate and up, applies the activation, multiplies by down, and adds up each
// token's routes. Threads take tasks of fixed size in any order; every number is computed by one task from its inputs
// alone, so any number of threads gives the same bits.
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <new>

#include "moereg_cpu.h"
#include "table.h"

#ifdef MOEREG_CPU_X86
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moereg_cpu {
namespace {

// Columns of a task: enough to read ahead in, few enough for many threads to share one token's experts.
constexpr int64_t kTileGates = 32;
constexpr int64_t kTileColumns = 64;
static_assert(kTileGates == kPanelColumns, "a task packs whole steps of panels");
constexpr int64_t kAlignment = 64;
// Longer calls run in pieces, each with at least kLeastTokens. The fp32 outputs of a piece's routes take at most so many
// bytes, and so do their intermediates.
constexpr int64_t kPieceBytes = 256 << 20;
constexpr int64_t kLeastTokens = 64;
// Rows of an expert from which on they are packed in panels, where the table has them.
constexpr int64_t kLeastPanelRows = 5;
// Bytes of the panels that weights are multiplied by at a time, which should stay in the second cache.
constexpr int64_t kPanelsBytes = 1 << 20;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t tiles_of(int64_t count, int64_t tile) { return (count + tile - 1) / tile; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t aligned(int64_t bytes) { return tiles_of(bytes, kAlignment) * kAlignment; }

#ifdef MOEREG_CPU_X86
Table amx_table() {
    Table table = kAvx512Bf16;
    table.name = "amx";
    table.panels = &kAmxPanels;
    return table;
}
const Table kAmx = amx_table();
const Table* const kTables[] = {&kPortable, &kAvx2, &kAvx512, &kAvx512Bf16, &kAmx};
#else
const Table* const kTables[] = {&kPortable};
#endif
constexpr int32_t kNumTables = sizeof kTables / sizeof *kTables;

#ifdef MOEREG_CPU_X86
// AMX in bfloat16, which Linux lets a process use that asked for its registers.
bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned bf16 = 1u << 22, tile = 1u << 24;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & bf16) == 0 || (d & tile) == 0) return false;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

bool runs(int32_t table) {
#ifdef MOEREG_CPU_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (table == 1) return avx2;
    if (table == 2) return avx512;
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (table == 3) return bf16;
    if (table == 4) return bf16 && has_amx();
#endif
    return table == 0;
}

// `count` rows in pieces of about equal size.
int64_t rows_at_a_time(int64_t count) { return tiles_of(count, tiles_of(larger(count, 1), kMaxRows)); }

int64_t item_bytes(int32_t format) { return format == MOEREG_CPU_F32 ? 4 : 2; }

int64_t tokens_of_piece(const moereg_cpu_layer& layer, int64_t num_tokens, bool is_per_expert) {
    const int64_t rows = is_per_expert ? layer.num_local_experts : layer.top_k;
    return smaller(num_tokens, larger(kLeastTokens, kPieceBytes / (rows * larger(layer.w2.rows, layer.w2.columns) * 4)));
}

// Cuts the workspace into parts.
class Parts {
  public:
    explicit Parts(void* begin) : begin_(static_cast<char*>(begin)) {}

    template <class T> T* take(int64_t count) {
        T* part = begin_ == nullptr ? nullptr : reinterpret_cast<T*>(begin_ + used_);
        used_ += aligned(count * static_cast<int64_t>(sizeof(T)));
        return part;
    }

    int64_t used() const { return used_; }

  private:
    char* begin_;
    int64_t used_ = 0;
};

// Rows of an expert that pass its weights together: all of them, or so many panels.
struct Unit {
    int64_t expert, first_panel, num_panels;  // no panels: all rows, one by one
};

struct Counter {
    // Each on a cache line of its own.
    alignas(kAlignment) std::atomic<int64_t> value;
};

// One piece of a call: its tokens from `first` on. N is routes, at most T * K, or the rows of a call whose rows are laid
// out per expert.
struct Run {
    const moereg_cpu_layer& layer;
    const moereg_cpu_call& call;
    const moereg_cpu_threads& threads;
    const Table& table;
    int64_t first, num_tokens;
    bool is_per_expert;
    int64_t hidden, intermediate, num_routes, packed_bytes, packed_inner_bytes, panel_bytes, panel_inner_bytes;

    // Parts of the workspace.
    Unit* units;              // [E + P]: experts with rows, with many of them several times
    int64_t* first_rows;      // [E + 1]: where each one's rows begin, in order of experts
    int64_t* routes;          // [N]: the route of each row
    int64_t* places;          // [N]: the row of each route, or -1
    int64_t* panel_rows;      // [P]: the first row of each panel
    int64_t* panel_counts;    // [P]: its rows
    Counter* counters;        // [4]: of each phase
    Counter* waiting;         // [E]: tiles of an expert without panels that are not done
    uint8_t* packed;          // [T]: packed hidden states
    float* inner;             // [N, I]
    uint8_t* packed_inner;    // [N]
    uint8_t* panels;          // [P]: packed hidden states of experts with many rows
    uint8_t* panels_inner;    // [P]: and their intermediates
    float* rows;              // [N, H]
    int64_t num_units = 0;
    int64_t num_rows = 0;
    int64_t num_panels = 0;

    Run(const moereg_cpu_layer& layer, const moereg_cpu_call& call, const moereg_cpu_threads& threads,
        const Table& table, int64_t first, int64_t num_tokens, bool is_per_expert)
        : layer(layer), call(call), threads(threads), table(table), first(first), num_tokens(num_tokens),
          is_per_expert(is_per_expert), hidden(layer.w2.rows), intermediate(layer.w2.columns),
          num_routes(num_tokens * (is_per_expert ? layer.num_local_experts : layer.top_k)),
          packed_bytes(table.packed_row_bytes(layer.w13)), packed_inner_bytes(table.packed_row_bytes(layer.w2)),
          panel_bytes(bytes_of_panel(layer.w13)), panel_inner_bytes(bytes_of_panel(layer.w2)) {
        if (panel_inner_bytes == 0) panel_bytes = 0;
    }

    int64_t bytes_of_panel(const moereg_cpu_matrix& matrix) const {
        return table.panels == nullptr ? 0 : table.panels->bytes(matrix, layer.format);
    }

    int64_t num_inputs() const { return is_per_expert ? num_routes : num_tokens; }

    // Where bits may not depend on other rows, all are in panels.
    int64_t least_panel_rows() const { return layer.w13.batch_invariant != 0 ? 1 : kLeastPanelRows; }

    // Each expert with panels has at most one that is not full.
    int64_t most_panels() const {
        if (panel_bytes == 0) return 0;
        return num_routes / kPanelRows + smaller(layer.num_local_experts, num_routes / least_panel_rows());
    }

    int64_t cut(void* workspace) {
        char* begin = static_cast<char*>(workspace);
        if (begin != nullptr) begin += -reinterpret_cast<uintptr_t>(begin) % kAlignment;
        Parts parts(begin);
        units = parts.take<Unit>(layer.num_local_experts + most_panels());
        first_rows = parts.take<int64_t>(layer.num_local_experts + 1);
        routes = parts.take<int64_t>(num_routes);
        places = parts.take<int64_t>(num_routes);
        panel_rows = parts.take<int64_t>(most_panels());
        panel_counts = parts.take<int64_t>(most_panels());
        counters = parts.take<Counter>(4);
        waiting = parts.take<Counter>(layer.num_local_experts);
        packed = parts.take<uint8_t>(num_inputs() * packed_bytes);
        inner = parts.take<float>(num_routes * intermediate);
        packed_inner = parts.take<uint8_t>(num_routes * packed_inner_bytes);
        panels = parts.take<uint8_t>(most_panels() * panel_bytes);
        panels_inner = parts.take<uint8_t>(most_panels() * panel_inner_bytes);
        rows = parts.take<float>(is_per_expert ? 0 : num_routes * hidden);
        return parts.used() + kAlignment;
    }

    // The local expert of a route, or -1.
    int64_t expert_of(int64_t route) const {
        int64_t id = call.topk_ids[first * layer.top_k + route];
        if (id < 0 || id >= layer.num_experts) return -1;
        if (call.expert_map != nullptr) id = call.expert_map[id];
        return id >= 0 && id < layer.num_local_experts ? id : -1;
    }

    // A stable counting sort of routes by expert.
    void sort() {
        const int64_t count = layer.num_local_experts;
        memset(first_rows, 0, static_cast<size_t>(count + 1) * sizeof *first_rows);
        if (is_per_expert) {
            for (int64_t expert = 0; expert < count; ++expert) {
                const int64_t count_here = smaller(call.expert_num_rows[expert] - first, num_tokens);
                first_rows[expert + 1] = first_rows[expert] + larger(count_here, 0);
                for (int64_t row = first_rows[expert]; row < first_rows[expert + 1]; ++row) {
                    routes[row] = expert * call.num_tokens + first + row - first_rows[expert];
                }
            }
        } else {
            for (int64_t route = 0; route < num_routes; ++route) {
                places[route] = expert_of(route);
                if (places[route] >= 0) ++first_rows[places[route] + 1];
            }
            for (int64_t expert = 0; expert < count; ++expert) first_rows[expert + 1] += first_rows[expert];
            // Each expert's next row; afterwards the entries have moved on by one expert.
            for (int64_t route = 0; route < num_routes; ++route) {
                if (places[route] < 0) continue;
                const int64_t row = first_rows[places[route]]++;
                routes[row] = route;
                places[route] = row;
            }
            memmove(first_rows + 1, first_rows, static_cast<size_t>(count) * sizeof *first_rows);
            first_rows[0] = 0;
        }
        num_rows = first_rows[count];
        for (int64_t expert = 0; expert < count; ++expert) add_units(expert);
        const int64_t tiles = tiles_of(intermediate, kTileGates);
        for (int64_t i = 0; i < num_units; ++i) new (&waiting[units[i].expert]) Counter{tiles};
        for (int phase = 0; phase < 4; ++phase) new (&counters[phase]) Counter{0};
    }

    void add_units(int64_t expert) {
        const int64_t begin = first_rows[expert], count = first_rows[expert + 1] - begin;
        if (count == 0) return;
        if (panel_bytes == 0 || count < least_panel_rows()) {
            units[num_units++] = {expert, 0, 0};
            return;
        }
        const int64_t here = tiles_of(count, kPanelRows);
        const int64_t most = larger(2, smaller(kMaxPanels, kPanelsBytes / larger(panel_bytes, panel_inner_bytes)));
        const int64_t at_a_time = tiles_of(here, tiles_of(here, most));
        for (int64_t panel = 0; panel < here; panel += at_a_time) {
            units[num_units++] = {expert, num_panels + panel, smaller(at_a_time, here - panel)};
        }
        for (int64_t row = 0; row < count; row += kPanelRows) {
            panel_rows[num_panels] = begin + row;
            panel_counts[num_panels++] = smaller(kPanelRows, count - row);
        }
    }

    // Runs tasks until there are none left. A thread claims one more before it runs one, and so knows what to prefetch;
    // there is none if `next` is `count` or more.
    template <class Task> void take(int phase, int64_t count, Task task) {
        const auto claim = [&] { return counters[phase].value.fetch_add(1, std::memory_order_relaxed); };
        for (int64_t place = claim(); place < count;) {
            const int64_t next = claim();
            task(place, next);
            place = next;
        }
    }

    int64_t input_of(int64_t row) const { return is_per_expert ? row : routes[row] / layer.top_k; }

    void pack_input(int64_t place) {
        // Rows that are laid out per expert are packed in order, without those that do not count.
        const int64_t from = is_per_expert ? routes[place] : first + place;
        const char* row = static_cast<const char*>(call.hidden_states) + from * hidden * item_bytes(layer.format);
        const float factor = layer.scales_input && !is_per_expert ? call.topk_weights[from] : 1.0f;
        table.pack(layer.w13, row, layer.format, factor, packed + place * packed_bytes);
    }

    void pack_panel(int64_t panel) {
        const void* inputs[kPanelRows];
        float factors[kPanelRows];
        const bool has_factors = layer.scales_input && !is_per_expert;
        for (int64_t m = 0; m < panel_counts[panel]; ++m) {
            const int64_t route = routes[panel_rows[panel] + m];
            const int64_t from = is_per_expert ? route : first + route / layer.top_k;
            inputs[m] = static_cast<const char*>(call.hidden_states) + from * hidden * item_bytes(layer.format);
            if (has_factors) factors[m] = call.topk_weights[from];
        }
        table.panels->pack(layer.w13, inputs, has_factors ? factors : nullptr, panel_counts[panel],
                           panels + panel * panel_bytes);
    }

    // Adds biases [begin, begin + columns) of an expert to `count` rows of at most kTileColumns.
    void add_bias(
        const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t columns, int64_t count, float* out,
        int64_t stride) const {
        if (matrix.bias == nullptr) return;
        float bias[kTileColumns];
        table.widen(matrix.bias, matrix.bias_format, expert * matrix.rows + begin, columns, bias);
        for (int64_t m = 0; m < count; ++m) table.add_scaled(out + m * stride, bias, 1.0f, columns);
    }

    // The row of a matrix with which a task begins, or -1.
    int64_t first_row_of(const moereg_cpu_matrix& matrix, int64_t place, int64_t tiles, int64_t tile) const {
        return place < num_units * tiles ? units[place / tiles].expert * matrix.rows + place % tiles * tile : -1;
    }

    void multiply_gates(int64_t place, int64_t next) {
        const int64_t tiles = tiles_of(intermediate, kTileGates);
        const Unit& unit = units[place / tiles];
        const int64_t expert = unit.expert, begin = place % tiles * kTileGates;
        const int64_t next_row = first_row_of(layer.w13, next, tiles, kTileGates);
        const int64_t columns = smaller(kTileGates, intermediate - begin);
        const int64_t stop = first_rows[expert + 1];
        const bool is_gated = layer.w13.rows == 2 * intermediate;
        if (unit.num_panels > 0) return multiply_panels_by_gates(unit, begin, columns, next_row, is_gated);
        float gates[kMaxRows * kTileGates], ups[kMaxRows * kTileGates];
        const void* inputs[kMaxRows];
        const int64_t most = rows_at_a_time(stop - first_rows[expert]);
        for (int64_t row = first_rows[expert]; row < stop; row += most) {
            const int64_t count = smaller(most, stop - row);
            for (int64_t m = 0; m < count; ++m) inputs[m] = packed + input_of(row + m) * packed_bytes;
            const int64_t up = intermediate + begin, up_row = expert * layer.w13.rows + up;
            table.product(layer.w13, expert, begin, begin + columns, is_gated ? up_row : next_row, inputs, count, gates,
                          kTileGates);
            add_bias(layer.w13, expert, begin, columns, count, gates, kTileGates);
            if (is_gated) {
                table.product(layer.w13, expert, up, up + columns, next_row, inputs, count, ups, kTileGates);
                add_bias(layer.w13, expert, up, columns, count, ups, kTileGates);
            }
            for (int64_t m = 0; m < count; ++m) {
                table.activate(layer, gates + m * kTileGates, ups + m * kTileGates, columns);
                memcpy(inner + (row + m) * intermediate + begin, gates + m * kTileGates,
                       static_cast<size_t>(columns) * sizeof *gates);
            }
        }
        // Whoever finishes an expert packs its rows for the second product.
        if (waiting[expert].value.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        for (int64_t row = first_rows[expert]; row < stop; ++row) {
            table.pack(layer.w2, inner + row * intermediate, MOEREG_CPU_F32, 1.0f,
                       packed_inner + row * packed_inner_bytes);
        }
    }

    void multiply_panels_by_gates(
        const Unit& unit, int64_t begin, int64_t columns, int64_t next_row, bool is_gated) {
        alignas(kAlignment) float gates[kMaxPanels * kPanelSize], ups[kMaxPanels * kPanelSize];
        const uint8_t* inputs = panels + unit.first_panel * panel_bytes;
        const int64_t expert = unit.expert, up = intermediate + begin;
        table.panels->product(layer.w13, expert, begin, begin + columns,
                              is_gated ? expert * layer.w13.rows + up : next_row, inputs, unit.num_panels, gates);
        if (is_gated) {
            table.panels->product(layer.w13, expert, up, up + columns, next_row, inputs, unit.num_panels, ups);
        }
        table.activate(layer, gates, ups, unit.num_panels * kPanelSize);
        for (int64_t i = 0; i < unit.num_panels; ++i) {
            float* of_panel = gates + i * kPanelSize;
            for (int64_t j = columns * kPanelRows; j < kPanelSize; ++j) of_panel[j] = 0;
            table.panels->pack_columns(layer.w2, of_panel, begin,
                                       panels_inner + (unit.first_panel + i) * panel_inner_bytes);
        }
    }

    // Columns [begin, begin + columns) of a unit's rows, kPanelColumns at most.
    void multiply_panels_by_down(const Unit& unit, int64_t begin, int64_t columns, int64_t next_row) {
        alignas(kAlignment) float products[kMaxPanels * kPanelSize], turned[kPanelSize];
        table.panels->product(layer.w2, unit.expert, begin, begin + columns, next_row,
                              panels_inner + unit.first_panel * panel_inner_bytes, unit.num_panels, products);
        for (int64_t i = 0; i < unit.num_panels; ++i) {
            table.panels->turn(products + i * kPanelSize, turned);
            const int64_t panel = unit.first_panel + i;
            for (int64_t m = 0; m < panel_counts[panel]; ++m) {
                const int64_t row = panel_rows[panel] + m;
                const float* from = turned + m * kPanelColumns;
                if (is_per_expert) {
                    store(from, routes[row] * hidden + begin, columns);
                } else {
                    memcpy(rows + row * hidden + begin, from, static_cast<size_t>(columns) * sizeof *from);
                }
            }
        }
    }

    void multiply_down(int64_t place, int64_t next) {
        const int64_t tiles = tiles_of(hidden, kTileColumns);
        const int64_t next_row = first_row_of(layer.w2, next, tiles, kTileColumns);
        const Unit& unit = units[place / tiles];
        const int64_t expert = unit.expert, begin = place % tiles * kTileColumns;
        const int64_t columns = smaller(kTileColumns, hidden - begin), stop = first_rows[expert + 1];
        if (unit.num_panels > 0) {
            for (int64_t done = 0; done < columns; done += kPanelColumns) {
                const int64_t here = smaller(kPanelColumns, columns - done), after = begin + done + here;
                multiply_panels_by_down(unit, begin + done, here,
                                        done + here < columns ? expert * layer.w2.rows + after : next_row);
            }
            return;
        }
        const void* inputs[kMaxRows];
        const int64_t most = rows_at_a_time(stop - first_rows[expert]);
        for (int64_t row = first_rows[expert]; row < stop; row += most) {
            const int64_t count = smaller(most, stop - row);
            for (int64_t m = 0; m < count; ++m) inputs[m] = packed_inner + (row + m) * packed_inner_bytes;
            float products[kMaxRows * kTileColumns];
            float* out = is_per_expert ? products : rows + row * hidden + begin;
            const int64_t stride = is_per_expert ? kTileColumns : hidden;
            table.product(layer.w2, expert, begin, begin + columns, next_row, inputs, count, out, stride);
            add_bias(layer.w2, expert, begin, columns, count, out, stride);
            for (int64_t m = 0; is_per_expert && m < count; ++m) {
                store(products + m * kTileColumns, routes[row + m] * hidden + begin, columns);
            }
        }
    }

    static constexpr int64_t kSumColumns = 512;

    void add_routes(int64_t place) {
        const int64_t tiles = tiles_of(hidden, kSumColumns);
        const int64_t token = place / tiles, begin = place % tiles * kSumColumns;
        const int64_t columns = smaller(kSumColumns, hidden - begin);
        float sum[kSumColumns] = {};
        for (int64_t k = 0; k < layer.top_k; ++k) {
            const int64_t route = token * layer.top_k + k, row = places[route];
            if (row < 0) continue;
            const float weight = layer.scales_input ? 1.0f : call.topk_weights[first * layer.top_k + route];
            table.add_scaled(sum, rows + row * hidden + begin, weight, columns);
        }
        store(sum, (first + token) * hidden + begin, columns);
    }

    void store(const float* from, int64_t place, int64_t count) {
        table.store(from, layer.out_format, static_cast<char*>(call.out) + place * item_bytes(layer.out_format), count);
    }

    void work() {
#ifdef MOEREG_CPU_X86
        // Subnormal codes of 8-bit floats are subnormal in registers, and must not count as zero.
        const unsigned modes = _mm_getcsr();
        _mm_setcsr(modes & ~0x8040u);
#endif
        const int64_t num_packed = is_per_expert ? num_rows : num_tokens;
        take(0, num_packed + num_panels, [&](int64_t place, int64_t) {
            if (place < num_packed) return pack_input(place);
            pack_panel(place - num_packed);
        });
        wait();
        take(1, num_units * tiles_of(intermediate, kTileGates),
             [this](int64_t place, int64_t next) { multiply_gates(place, next); });
        wait();
        take(2, num_units * tiles_of(hidden, kTileColumns),
             [this](int64_t place, int64_t next) { multiply_down(place, next); });
        if (!is_per_expert) {
            wait();
            take(3, num_tokens * tiles_of(hidden, kSumColumns), [this](int64_t place, int64_t) { add_routes(place); });
        }
#ifdef MOEREG_CPU_X86
        _mm_setcsr(modes);
#endif
    }

    void wait() {
        if (threads.parallel != nullptr && threads.num_threads > 1) threads.barrier();
    }

    static void work_on(void* run) { static_cast<Run*>(run)->work(); }
};

}  // namespace
}  // namespace moereg_cpu

using namespace moereg_cpu;

#define MOEREG_CPU_EXPORT extern "C" __attribute__((visibility("default")))

MOEREG_CPU_EXPORT int32_t moereg_cpu_api(void) { return MOEREG_CPU_API; }

MOEREG_CPU_EXPORT int32_t moereg_cpu_num_tables(void) { return kNumTables; }

MOEREG_CPU_EXPORT const char* moereg_cpu_table_name(int32_t table) {
    return table >= 0 && table < kNumTables ? kTables[table]->name : nullptr;
}

MOEREG_CPU_EXPORT int32_t moereg_cpu_table_runs(int32_t table) {
    return table >= 0 && table < kNumTables && runs(table);
}

MOEREG_CPU_EXPORT int64_t moereg_cpu_workspace_bytes(
    const moereg_cpu_layer* layer, int64_t num_tokens, int32_t is_per_expert, int32_t table) {
    const moereg_cpu_call call = {};
    const moereg_cpu_threads threads = {};
    const int64_t piece = tokens_of_piece(*layer, num_tokens, is_per_expert != 0);
    return Run(*layer, call, threads, *kTables[table], 0, piece, is_per_expert != 0).cut(nullptr);
}

MOEREG_CPU_EXPORT int32_t moereg_cpu_run(
    const moereg_cpu_layer* layer, const moereg_cpu_call* call, const moereg_cpu_threads* threads, int32_t table) {
    const Table& chosen = *kTables[table];
    if (chosen.packed_row_bytes(layer->w13) == 0 || chosen.packed_row_bytes(layer->w2) == 0) return 1;
    const bool is_per_expert = call->expert_num_rows != nullptr;
    const int64_t piece = tokens_of_piece(*layer, call->num_tokens, is_per_expert);
    for (int64_t first = 0; first < call->num_tokens; first += piece) {
        Run run(*layer, *call, *threads, chosen, first, smaller(piece, call->num_tokens - first), is_per_expert);
        run.cut(call->workspace);
        run.sort();
        if (threads->parallel != nullptr && threads->num_threads > 1) {
            threads->parallel(Run::work_on, &run, static_cast<unsigned>(threads->num_threads), 0);
        } else {
            run.work();
        }
    }
    return 0;
}

MOEREG_CPU_EXPORT uint64_t moereg_cpu_read(const void* memory, int64_t num_bytes, int32_t table) {
    return kTables[table]->read(memory, num_bytes);
}
