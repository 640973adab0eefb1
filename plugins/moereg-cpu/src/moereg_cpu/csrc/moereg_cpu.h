// The C interface of moereg-cpu: plain structures and pointers, no type of torch, so that one library serves every
// version of torch and Python. src/moereg_cpu/library.py declares the same structures for ctypes.
#ifndef MOEREG_CPU_H
#define MOEREG_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Bumped with every change of the structures or functions below.
#define MOEREG_CPU_API 4

enum moereg_cpu_format {
    MOEREG_CPU_F32 = 0,
    MOEREG_CPU_F16 = 1,
    MOEREG_CPU_BF16 = 2,
    MOEREG_CPU_I8 = 3,    // int8 in two's complement
    MOEREG_CPU_E4M3 = 4,  // float8_e4m3fn
    MOEREG_CPU_U4 = 5,    // two to a byte, the low nibble first; 8 means zero where there are no zero points
    MOEREG_CPU_E2M1 = 6,  // float4_e2m1fn, two to a byte
    MOEREG_CPU_E8M0 = 7,  // scales only
};

enum moereg_cpu_activation {
    MOEREG_CPU_SIGMOID_GATE = 0,  // silu and swigluoai
    MOEREG_CPU_GELU = 1,
    MOEREG_CPU_GELU_TANH = 2,
    MOEREG_CPU_RELU2 = 3,  // without a gate
    MOEREG_CPU_SITU = 4,
};

// One of a layer's two matrices, [experts, rows, columns], in canonical order.
struct moereg_cpu_matrix {
    const void* weight;
    const void* scale;          // NULL for 16- and 32-bit weights
    const float* scale_2;       // one per expert or one per expert and half, or NULL
    const uint8_t* zero_point;  // packed like 4-bit codes along the groups, or NULL
    const void* bias;           // [experts, rows], or NULL
    int64_t rows;
    int64_t columns;
    int32_t format;
    int32_t bias_format;
    int32_t scale_format;    // F32, E8M0 or E4M3
    int32_t group_columns;   // 16, 32, 64, 128, or 0 for a whole row
    int32_t group_rows;      // rows that share scales, or 0 for a whole matrix
    int32_t scale_halves;    // of scales of several rows or a matrix: 2 if gate and up have their own
    int32_t scale_2_halves;  // likewise
    int32_t rounds_tokens;   // whether inputs are rounded to int8 with a scale per row; for I8
    int32_t batch_invariant; // whether a row's bits must not depend on the rows beside it
};

struct moereg_cpu_layer {
    struct moereg_cpu_matrix w13;
    struct moereg_cpu_matrix w2;
    int64_t num_experts;        // ids are below this
    int64_t num_local_experts;  // experts that the matrices hold
    int64_t top_k;
    int32_t format;      // of hidden states
    int32_t out_format;  // of the output
    int32_t activation;
    int32_t scales_input;  // whether routing weights scale the input instead of the output
    int32_t has_limit;
    float alpha;
    float beta;
    float limit;
    float gate_softcap;  // of situ
    float up_softcap;    // of situ, or 0 for none
};

// How to run a function on several threads: OpenMP's own entry points, out of the runtime that the process has loaded.
struct moereg_cpu_threads {
    void (*parallel)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);  // or NULL
    void (*barrier)(void);
    int32_t num_threads;
};

struct moereg_cpu_call {
    const void* hidden_states;       // [tokens, hidden]; per expert [experts, tokens, hidden]
    const float* topk_weights;       // [tokens, top_k]
    const int32_t* topk_ids;         // [tokens, top_k]
    const int32_t* expert_map;       // [num_experts], or NULL
    const int32_t* expert_num_rows;  // [experts]: rows are laid out per expert, and come back unweighted; or NULL
    void* out;                       // [tokens, hidden]; per expert [experts, tokens, hidden]
    void* workspace;                 // at any address
    int64_t num_tokens;
};

int32_t moereg_cpu_api(void);

// The number of tables of kernels, the name of each, and whether this processor runs it, to be asked before one is used:
// it also asks Linux for AMX. A higher one is faster.
int32_t moereg_cpu_num_tables(void);
const char* moereg_cpu_table_name(int32_t table);
int32_t moereg_cpu_table_runs(int32_t table);

// Bytes of scratch that a call needs, at any number of threads. More tokens never need less.
int64_t moereg_cpu_workspace_bytes(
    const struct moereg_cpu_layer* layer, int64_t num_tokens, int32_t is_per_expert, int32_t table);

// Runs a layer. Returns 0, or 1 if the table has no kernel for a matrix.
int32_t moereg_cpu_run(
    const struct moereg_cpu_layer* layer, const struct moereg_cpu_call* call,
    const struct moereg_cpu_threads* threads, int32_t table);

// Reads memory as fast as this processor can, for a rate to compare with: the sum keeps the loads.
uint64_t moereg_cpu_read(const void* memory, int64_t num_bytes, int32_t table);

#ifdef __cplusplus
}
#endif

#endif
