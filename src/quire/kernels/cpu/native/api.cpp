// The functions that Python calls. Pointers are to memory that the caller keeps.
#include "decode_step.h"
#include "draw.h"

using namespace quire;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* quire_open(int32_t num_threads, int32_t matrix_unit) { return new Workspace(num_threads, matrix_unit != 0); }
EXPORT int32_t quire_uses_matrix_unit(void* workspace) { return static_cast<Workspace*>(workspace)->all.scratch.matrix_unit; }
EXPORT void quire_close(void* workspace) { delete static_cast<Workspace*>(workspace); }
// active: how many threads compute from now on; 0: as many as other programs leave cores for.
EXPORT void quire_set_threads(void* workspace, int32_t active) {
    auto& w = *static_cast<Workspace*>(workspace);
    w.control.set_fixed(active > 0);
    w.pool.set_active(active > 0 ? active : w.pool.num_threads());
}
EXPORT int32_t quire_active_threads(void* workspace) { return static_cast<Workspace*>(workspace)->pool.num_active(); }
EXPORT int64_t quire_panel_bytes(int32_t format, int32_t width) { return panel_bytes(format, width); }

// rows: [count] indices of stored rows, or null for all in order. packed: filled with zeros.
EXPORT void quire_pack(void* workspace, int32_t format, int32_t encoding, const uint8_t* stored, int64_t stored_row_bytes,
                       const int32_t* rows, int32_t count, int32_t width, uint8_t* packed) {
    const int64_t bytes = panel_bytes(format, width);
    static_cast<Workspace*>(workspace)->pool.run((count + kPanelRows - 1) / kPanelRows, [&](int panel, int) {
        for (int row = panel * kPanelRows; row < std::min(count, (panel + 1) * kPanelRows); row++)
            pack_row(format, encoding, stored + (rows ? rows[row] : row) * stored_row_bytes, width, row % kPanelRows, packed + panel * bytes);
    });
}

// Rows of a packed matrix as float32, times a factor. out: [count, width_in].
EXPORT void quire_embed(const Linear* weight, const int64_t* rows, int32_t count, float factor, float* out) {
    for (int i = 0; i < count; i++) embed(*weight, rows[i], factor, out + (int64_t)i * weight->width_in);
}

// x: [tokens, width_in]; out: [tokens, width_out].
EXPORT void quire_linear(void* workspace, const Linear* weight, const float* x, int64_t tokens, float* out) {
    static_cast<Workspace*>(workspace)->all.multiply(*weight, x, tokens, out);
}

// The operations of a layer one by one. query: [tokens, stride]; out: [tokens, heads * dim].
EXPORT void quire_attend(void* workspace, const Heads* heads, const Step* step, int32_t window, const float* query, int64_t stride, float* out) {
    StepAttention attention(*heads, step->num_sequences, step->tables, step->table_width, step->starts, step->lengths,
                            static_cast<Workspace*>(workspace)->all.scratch.matrix_unit);
    attention.attend(static_cast<Workspace*>(workspace)->pool, layer_of(*step, 0), window, query, stride, out);
}

// qkv: [tokens, heads + 2 * kv_heads, dim], changed. norm: [heads + kv_heads, dim], or null.
EXPORT void quire_rotate_and_write(void* workspace, const Heads* heads, const Step* step, const float* norm, float epsilon, float* qkv) {
    const int64_t stride = (int64_t)(heads->queries + 2 * heads->keys) * heads->dim;
    static_cast<Workspace*>(workspace)->all.each(step->num_tokens, [&](int64_t t) {
        rotate_and_write(*heads, *step, layer_of(*step, 0), 0, norm, epsilon, t, qkv + t * stride);
    });
}

// Where residual is given, x is added to it first. x, residual, out: [tokens, width].
EXPORT void quire_norm(void* workspace, const float* x, float* residual, int64_t tokens, int32_t width, float epsilon, const float* weight, float* out) {
    static_cast<Workspace*>(workspace)->all.each(tokens, [&](int64_t t) {
        if (residual) add_row(residual + t * width, x + t * width, width);
        rms_norm((residual ? residual : x) + t * width, weight, width, epsilon, out + t * width);
    });
}

// gate_up: [tokens, 2 * width]; out: [tokens, width].
EXPORT void quire_gate(void* workspace, const float* gate_up, int64_t tokens, int32_t width, int32_t activation, float* out) {
    static_cast<Workspace*>(workspace)->all.each(tokens, [&](int64_t t) { gate(gate_up + t * 2 * width, width, activation, out + t * width); });
}

// residual: [tokens, hidden], changed; out: [tokens, hidden], of which the selected rows are first.
EXPORT void quire_forward(void* workspace, const Model* model, const Step* step, float* residual, float* out) {
    auto& w = *static_cast<Workspace*>(workspace);
    w.timed([&] { Forward(w, *model, *step, w.all.scratch.matrix_unit).run(residual, out); });
}

// A step of rows that decode, which may be taken again. outcome, tokens: only of steps that are greedy and without drafts.
struct DecodeCall {
    Workspace* workspace;
    const Model* model;
    const Tables* tables;
    const RowColumns* columns;
    const Step* step;     // place and strides of the KV store
    const int32_t* rows;  // [count]
    int64_t count;
    int64_t* outcome;  // [5, count]
    int32_t* tokens;   // [count]

    template <class Body>
    void run(const Body& body) const {
        workspace->timed([&] {
            DecodeStep decode(*workspace, *model, *tables, *columns);
            body(decode);
        });
    }
};

// Greedy rows. Whether each has a token and goes on: then `tokens` says all.
EXPORT int32_t quire_decode_greedy(const DecodeCall* call) {
    bool all_go_on = false;
    call->run([&](DecodeStep& decode) { all_go_on = decode.run_greedy(call->rows, (int)call->count, *call->step, call->outcome, call->tokens); });
    return all_go_on;
}

// logits: [count, vocab].
EXPORT void quire_decode_logits(const DecodeCall* call, float* logits) {
    call->run([&](DecodeStep& decode) { decode.run_logits(call->rows, (int)call->count, *call->step, logits); });
}

// Greedy rows with drafts. outcome: [5, count + drafts]; advances: [count].
EXPORT void quire_verify(const DecodeCall* call, const int32_t* draft_counts, const int64_t* draft_tokens, int64_t* outcome, int32_t* advances) {
    call->run([&](DecodeStep& decode) {
        decode.verify_greedy(call->rows, (int)call->count, {draft_counts, draft_tokens}, *call->step, outcome, advances);
    });
}

// A token for each row. logits, weights: [count, vocab]; highest, rows, positions, tokens: [count].
EXPORT void quire_draw(void* workspace, const float* logits, const float* weights, const float* highest, int32_t count, int32_t vocab,
                       const int64_t* rows, const int64_t* positions, const SamplingColumns* columns, int64_t* tokens) {
    static_cast<Workspace*>(workspace)->pool.run(count, [&](int i, int) {
        const int64_t* integers = columns->integers + rows[i] * columns->integers_stride;
        const double* floats = columns->floats + rows[i] * columns->floats_stride;
        TokenDraw draw(logits + (int64_t)i * vocab, weights + (int64_t)i * vocab, vocab, highest[i], floats[0], floats[2]);
        tokens[i] = draw.draw(chance_of(integers[0], integers[1], positions[i]), integers[2], floats[1]);
    });
}

EXPORT void quire_profile(void* workspace, Profile* out) {
    *out = static_cast<Workspace*>(workspace)->take_profile();
}
