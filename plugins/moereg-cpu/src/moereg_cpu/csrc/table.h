// What a translation unit for one instruction set provides. Only plain functions cross this border: inline functions
// of the standard library would be merged by the linker with those of a unit that uses other instructions.
#pragma once

#include <stdint.h>

#include "moereg_cpu.h"

namespace moereg_cpu {

// Rows are packed in blocks of this many columns, the last one padded with zeros.
constexpr int64_t kBlock = 128;

// Packed rows of a product, at most. Their packed form should stay in the second cache.
constexpr int64_t kMaxRows = 18;

// Many rows are packed in panels of so many, and a product writes so many of their columns: [kPanelColumns, kPanelRows].
constexpr int64_t kPanelRows = 16, kPanelColumns = 32, kPanelSize = kPanelRows * kPanelColumns;

// Panels of a product, at most.
constexpr int64_t kMaxPanels = 16;

// Products of panels, where a table has faster ones for many rows.
struct Panels {
    // Bytes of a packed panel; 0 if there is no such product with a matrix for activations of `format`.
    int64_t (*bytes)(const moereg_cpu_matrix& matrix, int32_t format);

    // Packs `count` rows of 16 bits, each times its factor where there are factors.
    void (*pack)(const moereg_cpu_matrix& matrix, const void* const* rows, const float* factors, int64_t count,
                 void* panel);

    // Packs [kPanelColumns, kPanelRows] numbers as the columns of a panel from `begin` on.
    void (*pack_columns)(const moereg_cpu_matrix& matrix, const float* numbers, int64_t begin, void* panel);

    // Products with at most kPanelColumns rows [begin, end) of one expert's matrix, and their bias:
    // out[panel][n - begin][row]. Panels follow each other, and `next` is as for Table::product.
    void (*product)(const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, int64_t next,
                    const uint8_t* panels, int64_t num_panels, float* out);

    // to[row][n] = from[n][row] of one panel.
    void (*turn)(const float* from, float* to);
};

struct Table {
    const char* name;

    // Bytes of a packed row, as the products with a matrix read it; 0 if the table has no such product.
    int64_t (*packed_row_bytes)(const moereg_cpu_matrix& matrix);

    // Packs `columns` numbers of `format`, each times `factor`.
    void (*pack)(const moereg_cpu_matrix& matrix, const void* row, int32_t format, float factor, void* packed);

    // Products of packed rows with the rows [begin, end) of one expert's matrix, without bias:
    // out[i * out_stride + n - begin]. `next` is the row, counted over all experts, with which the caller's next
    // product begins, or -1.
    void (*product)(
        const moereg_cpu_matrix& matrix, int64_t expert, int64_t begin, int64_t end, int64_t next,
        const void* const* packed, int64_t num_rows, float* out, int64_t out_stride);

    // gate[i] = activation(gate[i], up[i]); `up` is not read without a gate.
    void (*activate)(const moereg_cpu_layer& layer, float* gate, const float* up, int64_t count);

    // sum[i] += weight * row[i].
    void (*add_scaled)(float* sum, const float* row, float weight, int64_t count);

    // Numbers [begin, begin + count) of an array of a format.
    void (*widen)(const void* from, int32_t format, int64_t begin, int64_t count, float* to);

    // Rounds to a format.
    void (*store)(const float* from, int32_t format, void* to, int64_t count);

    uint64_t (*read)(const void* memory, int64_t num_bytes);

    const Panels* panels;  // or NULL
};

extern const Table kPortable;
#ifdef MOEREG_CPU_X86
extern const Table kAvx2;
extern const Table kAvx512;
extern const Table kAvx512Bf16;
extern const Panels kAmxPanels;
#endif

}  // namespace moereg_cpu
