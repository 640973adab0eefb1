// Runs every table that this processor has over small layers of every format, for the sanitizers: arrays have exactly
// the sizes of a layer's tensors, so that a byte too many is seen. Checks that results are finite, that threads give
// the same bits, and that tables agree. Prints a line per table, and exits with 1 if something differs.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "moereg_cpu.h"

namespace {

struct Scheme {
    const char* name;
    int32_t format, scale_format, group_columns, group_rows;
    bool has_zero_points, has_second_scale, rounds_tokens = false;
};

constexpr Scheme kSchemes[] = {
    {"f32", MOEREG_CPU_F32, 0, 0, 0, false, false},
    {"f16", MOEREG_CPU_F16, 0, 0, 0, false, false},
    {"bf16", MOEREG_CPU_BF16, 0, 0, 0, false, false},
    {"int8", MOEREG_CPU_I8, MOEREG_CPU_F32, 0, 1, false, false},
    {"int8 tokens", MOEREG_CPU_I8, MOEREG_CPU_F32, 0, 1, false, false, true},
    {"fp8 tensor", MOEREG_CPU_E4M3, MOEREG_CPU_F32, 0, 0, false, false},
    {"fp8 channel", MOEREG_CPU_E4M3, MOEREG_CPU_F32, 0, 1, false, false},
    {"fp8 block", MOEREG_CPU_E4M3, MOEREG_CPU_F32, 128, 128, false, false},
    {"mxfp8", MOEREG_CPU_E4M3, MOEREG_CPU_E8M0, 32, 1, false, false},
    {"int4 g32", MOEREG_CPU_U4, MOEREG_CPU_F32, 32, 1, false, false},
    {"int4 g32 zp", MOEREG_CPU_U4, MOEREG_CPU_F32, 32, 1, true, false},
    {"int4 g64", MOEREG_CPU_U4, MOEREG_CPU_F32, 64, 1, false, false},
    {"int4 g64 zp", MOEREG_CPU_U4, MOEREG_CPU_F32, 64, 1, true, false},
    {"int4 g128", MOEREG_CPU_U4, MOEREG_CPU_F32, 128, 1, false, false},
    {"int4 g128 zp", MOEREG_CPU_U4, MOEREG_CPU_F32, 128, 1, true, false},
    {"int4 gall", MOEREG_CPU_U4, MOEREG_CPU_F32, 0, 1, false, false},
    {"int4 gall zp", MOEREG_CPU_U4, MOEREG_CPU_F32, 0, 1, true, false},
    {"mxfp4", MOEREG_CPU_E2M1, MOEREG_CPU_E8M0, 32, 1, false, false},
    {"nvfp4", MOEREG_CPU_E2M1, MOEREG_CPU_E4M3, 16, 1, false, true},
};

uint32_t state = 1;
uint32_t draw() { return state = state * 1664525u + 1013904223u; }

template <class T> using Array = std::vector<T>;

// The tensors of a matrix, each in an allocation of its own.
struct Tensors {
    Array<uint8_t> weight, scale, zero_point, bias;
    Array<float> scale_2;
};

int64_t groups_of(int64_t size, int64_t extent) { return extent == 0 ? 1 : (size + extent - 1) / extent; }

Tensors fill(
    moereg_cpu_matrix& matrix, const Scheme& scheme, int64_t experts, int64_t rows, int64_t columns, int32_t halves) {
    matrix = {};
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.format = scheme.format;
    matrix.scale_format = scheme.scale_format;
    matrix.group_columns = scheme.group_columns;
    matrix.group_rows = scheme.group_rows;
    matrix.scale_halves = halves;
    matrix.scale_2_halves = 1;
    matrix.rounds_tokens = scheme.rounds_tokens;
    matrix.bias_format = MOEREG_CPU_BF16;
    Tensors tensors;
    const int64_t bits[] = {32, 16, 16, 8, 8, 4, 4};
    const int64_t row_bytes = (columns * bits[scheme.format] + 7) / 8;
    tensors.weight.resize(static_cast<size_t>(experts * rows * row_bytes));
    for (int64_t i = 0; i < experts * rows * row_bytes; ++i) {
        tensors.weight[i] = static_cast<uint8_t>(draw() >> 24);
        // Exponents of floats in a usual range, and no NaN.
        if (scheme.format == MOEREG_CPU_F32 && i % 4 == 3) tensors.weight[i] = 0x3c | (draw() >> 24 & 0x80);
        if ((scheme.format == MOEREG_CPU_F16 || scheme.format == MOEREG_CPU_BF16) && i % 2 == 1) {
            tensors.weight[i] = 0x3c | (draw() >> 24 & 0x80);
        }
        if (scheme.format == MOEREG_CPU_E4M3 && (tensors.weight[i] & 0x7f) == 0x7f) tensors.weight[i] = 0;
    }
    if (scheme.format > MOEREG_CPU_BF16) {
        const int64_t groups = groups_of(columns, scheme.group_columns);
        const int64_t count = experts * halves * groups_of(rows / halves, scheme.group_rows) * groups;
        if (scheme.scale_format == MOEREG_CPU_F32) {
            tensors.scale.resize(static_cast<size_t>(count) * 4);
            for (int64_t i = 0; i < count; ++i) {
                const float scale = 0.001f + 0.001f * static_cast<float>(draw() >> 30);
                memcpy(&tensors.scale[i * 4], &scale, 4);
            }
        } else {
            tensors.scale.resize(static_cast<size_t>(count));
            const uint32_t least = scheme.scale_format == MOEREG_CPU_E8M0 ? 115 : 32;
            for (auto& code : tensors.scale) code = static_cast<uint8_t>(least + (draw() >> 30));
        }
        if (scheme.has_zero_points) {
            tensors.zero_point.resize(static_cast<size_t>(experts * rows * ((groups + 1) / 2)));
            for (auto& pair : tensors.zero_point) pair = static_cast<uint8_t>(draw() >> 24);
        }
        if (scheme.has_second_scale) tensors.scale_2.assign(static_cast<size_t>(experts), 0.25f);
    }
    tensors.bias.resize(static_cast<size_t>(experts * rows) * 2, 0x3c);
    matrix.weight = tensors.weight.data();
    matrix.scale = tensors.scale.empty() ? nullptr : tensors.scale.data();
    matrix.zero_point = scheme.has_zero_points ? tensors.zero_point.data() : nullptr;
    matrix.scale_2 = scheme.has_second_scale ? tensors.scale_2.data() : nullptr;
    matrix.bias = tensors.bias.data();
    return tensors;
}

// Stand-ins for OpenMP's entry points.
std::mutex lock;
std::condition_variable arrived;
unsigned team, waiting, generation;

void barrier() {
    std::unique_lock<std::mutex> guard(lock);
    const unsigned mine = generation;
    if (++waiting == team) {
        waiting = 0;
        ++generation;
        arrived.notify_all();
    } else {
        arrived.wait(guard, [mine] { return generation != mine; });
    }
}

void parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned) {
    team = num_threads;
    std::vector<std::thread> threads;
    for (unsigned i = 1; i < num_threads; ++i) threads.emplace_back(function, data);
    function(data);
    for (auto& thread : threads) thread.join();
}

Array<float> run(
    const moereg_cpu_layer& layer, int64_t tokens, int32_t table, int32_t num_threads, bool is_per_expert) {
    const int64_t hidden = layer.w2.rows, experts = layer.num_local_experts;
    const int64_t rows = is_per_expert ? experts * tokens : tokens;
    state = 7;
    Array<float> out(static_cast<size_t>(rows * hidden), 0.0f);
    const size_t size = layer.format == MOEREG_CPU_F32 ? 4 : 2;
    Array<uint8_t> input(static_cast<size_t>(rows * hidden) * size);
    for (size_t place = 0; place < input.size(); place += size) {
        const float value = static_cast<float>(draw() >> 8) / 16777216.0f - 0.5f;
        // Of a bfloat16, the upper half.
        memcpy(&input[place], reinterpret_cast<const char*>(&value) + 4 - size, size);
    }
    Array<float> weights(static_cast<size_t>(tokens * layer.top_k));
    for (auto& weight : weights) weight = static_cast<float>(1 + (draw() >> 30)) / 4;
    Array<int32_t> ids(static_cast<size_t>(tokens * layer.top_k)), map(static_cast<size_t>(layer.num_experts)), counts;
    for (auto& id : ids) id = static_cast<int32_t>(draw() >> 16) % (static_cast<int32_t>(layer.num_experts) + 2) - 1;
    for (size_t i = 0; i < map.size(); ++i) map[i] = static_cast<int32_t>(i) - 1;
    for (int64_t i = 0; i < experts; ++i) counts.push_back(static_cast<int32_t>((i * 20 + 3) % (tokens + 1)));
    Array<uint8_t> workspace(static_cast<size_t>(moereg_cpu_workspace_bytes(&layer, tokens, is_per_expert, table)));
    memset(workspace.data(), 0xff, workspace.size());
    moereg_cpu_call call = {};
    call.hidden_states = input.data();
    call.topk_weights = weights.data();
    call.topk_ids = ids.data();
    call.expert_map = map.data();
    call.expert_num_rows = is_per_expert ? counts.data() : nullptr;
    call.out = out.data();
    call.workspace = workspace.data();
    call.num_tokens = tokens;
    const moereg_cpu_threads threads = {parallel, barrier, num_threads};
    if (moereg_cpu_run(&layer, &call, &threads, table) != 0) {
        fprintf(stderr, "no kernel\n");
        exit(1);
    }
    return out;
}

double distance(const Array<float>& a, const Array<float>& b) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return std::sqrt(difference / size);
}

}  // namespace

int main() {
    const int64_t sizes[][2] = {{256, 128}, {40, 24}, {131, 77}, {1, 1}, {300, 2300}};
    int failures = 0;
    for (int32_t table = 0; table < moereg_cpu_num_tables(); ++table) {
        if (!moereg_cpu_table_runs(table)) continue;
        int runs = 0;
        for (const Scheme& scheme : kSchemes) {
            for (const auto& size : sizes) {
                moereg_cpu_layer layer = {};
                layer.num_experts = 4;
                layer.num_local_experts = 3;
                layer.top_k = 2;
                layer.activation = runs % 5;
                layer.alpha = 1;
                layer.gate_softcap = 4;
                layer.up_softcap = 25;
                const int32_t halves = layer.activation == MOEREG_CPU_RELU2 ? 1 : 2;
                const Tensors w13 = fill(layer.w13, scheme, 3, halves * size[1], size[0], halves);
                const Tensors w2 = fill(layer.w2, scheme, 3, size[0], size[1], 1);
                for (const int64_t tokens : {1, 5, 47, 300}) {
                    // The largest in a few layers: panels of one expert in several units, an odd number among them.
                    if (tokens == 300 && size[0] != 131) continue;
                    for (const bool is_per_expert : {false, true}) {
                        layer.format = tokens == 5 ? MOEREG_CPU_F32 : MOEREG_CPU_BF16;
                        layer.scales_input = tokens == 47 && runs % 4 == 0;
                        const auto one = run(layer, tokens, table, 1, is_per_expert);
                        const auto three = run(layer, tokens, table, 3, is_per_expert);
                        const double apart = distance(one, run(layer, tokens, 0, 1, is_per_expert));
                        bool is_finite = true;
                        for (const float value : one) is_finite = is_finite && std::isfinite(value);
                        const bool is_same = memcmp(one.data(), three.data(), one.size() * sizeof(float)) == 0;
                        // A table may round to bfloat16.
                        if (!is_finite || !is_same || !(apart <= 0.02)) {
                            fprintf(stderr, "%s, %s, H %d I %d T %d: finite %d, same %d, %.1e from portable\n",
                                    moereg_cpu_table_name(table), scheme.name, static_cast<int>(size[0]),
                                    static_cast<int>(size[1]), static_cast<int>(tokens), is_finite, is_same, apart);
                            ++failures;
                        }
                        ++runs;
                    }
                }
            }
        }
        printf("%s: %d layers\n", moereg_cpu_table_name(table), runs);
    }
    return failures != 0;
}
