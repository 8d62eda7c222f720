// All layers of a decoder for one step, in one call.
#pragma once
#include "attention.h"
#include "pack.h"
#include "worker.h"

namespace quire {

struct Layer {
    Linear qkv, output, gate_up, down;
    const float* attention_norm;
    const float* mlp_norm;
    const float* attention_post_norm;  // or null
    const float* mlp_post_norm;        // or null
    const float* head_norm;            // [heads + kv_heads, dim], or null
    int32_t window;
    int32_t rope;  // which rotation of the step
};

struct Model {
    Heads heads;
    int32_t hidden, ffn, num_layers, activation;
    float epsilon, head_epsilon;
    const Layer* layers;
    const float* final_norm;
};

struct Step {
    int32_t num_tokens, num_sequences;
    const int64_t* slots;
    const int32_t* tables;
    int64_t table_width;
    const int32_t* starts;
    const int32_t* lengths;
    const float* cos[2];  // [tokens, rotary], for each rope of the model
    const float* sin[2];
    int32_t rotary[2];
    uint8_t* kv;  // the first layer of the store
    int64_t layer_stride, block_stride, value_stride, token_stride, head_stride;
    int32_t kv_format, block_size;
    const int64_t* selected;  // or null
    int32_t num_selected;
    int32_t num_captured;
    // What enters each of these layers is copied to [tokens, num_captured, hidden], or null. The number of layers: what
    // leaves the last one, for which no tokens are selected.
    int32_t captured_layers[4];
    float* captured;
};

static inline KvLayer layer_of(const Step& step, int index) {
    return {step.kv + index * step.layer_stride * number_bytes(step.kv_format), step.block_stride, step.value_stride,
            step.token_stride, step.head_stride, step.kv_format, step.block_size};
}

// Numbers of some bytes, one in each row of a matrix of `stride` numbers.
template <int kBytes>
static inline void write_column(const uint8_t* numbers, int count, int64_t stride, uint8_t* out) {
    for (int i = 0; i < count; i++) std::memcpy(out + i * stride * kBytes, numbers + i * kBytes, kBytes);
}

// One head of a token to its place in a block.
static inline void write_key_and_value(const KvLayer& kv, const float* key, const float* value, int64_t block, int offset, int head, int dim) {
    alignas(64) uint8_t numbers[4 * kMaxDim];
    uint8_t* keys = keys_of(kv, block, head, dim);
    uint8_t* values = value_of(kv, block, offset, head);
    if (kv.format == kInt8) {
        const float key_scale = store_codes(key, dim, numbers), value_scale = store_codes(value, dim, values);
        write_column<1>(numbers, dim, kv.block_size, keys + offset);
        std::memcpy(keys + (int64_t)dim * kv.block_size + offset * kKvScaleBytes, &key_scale, kKvScaleBytes);
        std::memcpy(values + dim, &value_scale, kKvScaleBytes);
        return;
    }
    store_numbers(key, kv.format, dim, numbers);
    if (number_bytes(kv.format) == 2) write_column<2>(numbers, dim, kv.block_size, keys + 2 * offset);
    else write_column<4>(numbers, dim, kv.block_size, keys + 4 * offset);
    store_numbers(value, kv.format, dim, values);
}

// One token's QK norm and RoPE, in place; then its keys and values go to their slot.
static inline void rotate_and_write(const Heads& heads, const Step& step, const KvLayer& kv, int rope, const float* norm, float epsilon, int64_t t, float* qkv) {
    const int rotary = step.rotary[rope];
    const float* cos = step.cos[rope] + t * rotary;
    const float* sin = step.sin[rope] + t * rotary;
    for (int h = 0; h < heads.queries + heads.keys; h++) {
        float* head = qkv + (int64_t)h * heads.dim;
        if (norm) rms_norm(head, norm + (int64_t)h * heads.dim, heads.dim, epsilon, head);
        rotate(head, cos, sin, rotary);
    }
    const int64_t block = step.slots[t] / kv.block_size;
    const int offset = (int)(step.slots[t] % kv.block_size);
    for (int h = 0; h < heads.keys; h++) {
        const float* key = qkv + (int64_t)(heads.queries + h) * heads.dim;
        write_key_and_value(kv, key, key + (int64_t)heads.keys * heads.dim, block, offset, h, heads.dim);
    }
}

// One row of a packed matrix as float32, times a factor.
static inline void embed(const Linear& weight, int64_t row, float factor, float* out) {
    const Segment* segment = weight.segments;
    while (row >= segment->first_row + segment->num_rows) segment++;
    const int64_t inside = row - segment->first_row;
    const uint8_t* panel = segment->data + inside / kPanelRows * panel_bytes(segment->format, weight.width_in);
    unpack_row(segment->format, panel, weight.width_in, (int)(inside % kPanelRows), out);
    if (factor != 1.0f) scale_row(out, factor, weight.width_in);
}

constexpr int64_t kMlpTokens = 256;  // tokens at once, to bound the memory of wide layers

class Forward {
public:
    // matrix_unit: whether it may compute attention.
    Forward(Workspace& workspace, const Model& model, const Step& step, bool matrix_unit)
        : w_(workspace), model_(model), step_(step),
          attention_(model.heads, step.num_sequences, step.tables, step.table_width, step.starts, step.lengths, matrix_unit) {}

    // residual: [tokens, hidden], embedded; out: [selected or tokens, hidden]. Between, out has the normed rows.
    void run(float* residual, float* out) {
        const int width = model_.hidden;
        int64_t tokens = step_.num_tokens;
        qkv_ = w_.qkv.floats(tokens * qkv_width());
        w_.each_block(tokens, [&](auto& worker, int64_t first, int64_t count) {
            worker.each(count, [&](int64_t t) {
                rms_norm(residual + (first + t) * width, model_.layers[0].attention_norm, width, model_.epsilon, out + (first + t) * width);
            });
            project(worker, 0, first, count, out);
        });
        for (int index = 0; index < model_.num_layers; index++) {
            const bool last = index + 1 == model_.num_layers;
            capture(index, residual);
            const float* attended = attend(index, tokens);
            if (last && step_.selected) {
                attended = gather(attended, residual);
                tokens = step_.num_selected;
                residual = gathered_;
            }
            w_.each_block(tokens, [&](auto& worker, int64_t first, int64_t count) {
                finish(worker, index, attended + first * attended_width(), residual + first * width, count, out + first * width);
                if (!last) project(worker, index + 1, first, count, out);
            });
        }
        capture(model_.num_layers, residual);
    }

private:
    int64_t qkv_width() const { return (int64_t)(model_.heads.queries + 2 * model_.heads.keys) * model_.heads.dim; }
    int64_t attended_width() const { return (int64_t)model_.heads.queries * model_.heads.dim; }

    // What enters a layer, or leaves the last one, of all tokens, if it is asked for.
    void capture(int index, const float* residual) {
        const int64_t width = model_.hidden, stride = step_.num_captured * width;
        for (int k = 0; k < step_.num_captured; k++)
            if (step_.captured_layers[k] == index)
                w_.all.each(step_.num_tokens, [&](int64_t t) {
                    std::copy(residual + t * width, residual + (t + 1) * width, step_.captured + t * stride + k * width);
                });
    }

    // The queries, keys and values of some tokens; keys and values go to their slots.
    template <class Pool>
    void project(Worker<Pool>& worker, int index, int64_t first, int64_t count, const float* normed) {
        const Layer& layer = model_.layers[index];
        float* qkv = qkv_ + first * qkv_width();
        worker.multiply(layer.qkv, normed + first * model_.hidden, count, qkv);
        const KvLayer kv = layer_of(step_, index);
        worker.each(count, [&](int64_t t) {
            rotate_and_write(model_.heads, step_, kv, layer.rope, layer.head_norm, model_.head_epsilon, first + t, qkv + t * qkv_width());
        });
    }

    const float* attend(int index, int64_t tokens) {
        Timer timer(w_.all.scratch.profile.attention);
        float* attended = w_.attended.floats((size_t)tokens * attended_width());
        attention_.attend(w_.pool, layer_of(step_, index), model_.layers[index].window, qkv_, qkv_width(), attended);
        return attended;
    }

    // The selected rows of what was attended, and of the residual.
    const float* gather(const float* attended, const float* residual) {
        const int width = (int)attended_width(), count = step_.num_selected;
        gathered_ = w_.gathered.floats((size_t)count * (width + model_.hidden));
        float* rows = gathered_ + (size_t)count * model_.hidden;
        for (int i = 0; i < count; i++) {
            const int64_t t = step_.selected[i];
            std::copy(residual + t * model_.hidden, residual + (t + 1) * model_.hidden, gathered_ + (size_t)i * model_.hidden);
            std::copy(attended + t * width, attended + (t + 1) * width, rows + (size_t)i * width);
        }
        return rows;
    }

    // A layer from what was attended to the rows that the next one begins with.
    template <class Pool>
    void finish(Worker<Pool>& worker, int index, const float* attended, float* residual, int64_t tokens, float* normed) {
        const Layer& layer = model_.layers[index];
        const int width = model_.hidden;
        float* projected = worker.scratch.projected.floats((size_t)tokens * width);
        worker.multiply(layer.output, attended, tokens, projected);
        close(worker, projected, residual, layer.attention_post_norm, layer.mlp_norm, tokens, normed);
        const float* next = index + 1 == model_.num_layers ? model_.final_norm : model_.layers[index + 1].attention_norm;
        for (int64_t t = 0; t < tokens; t += kMlpTokens) {
            const int64_t count = std::min(kMlpTokens, tokens - t);
            float* gated = worker.scratch.gated.floats((size_t)count * model_.ffn);
            worker.multiply_and_gate(layer.gate_up, normed + t * width, count, model_.activation, gated);
            worker.multiply(layer.down, gated, count, projected);
            close(worker, projected, residual + t * width, layer.mlp_post_norm, next, count, normed + t * width);
        }
    }

    // The end of one half of a layer: post norm, residual, next norm.
    template <class Pool>
    void close(Worker<Pool>& worker, float* x, float* residual, const float* post_norm, const float* next_norm, int64_t tokens, float* out) {
        const int width = model_.hidden;
        worker.each(tokens, [&](int64_t t) {
            float* row = x + t * width;
            if (post_norm) rms_norm(row, post_norm, width, model_.epsilon, row);
            add_row(residual + t * width, row, width);
            rms_norm(residual + t * width, next_norm, width, model_.epsilon, out + t * width);
        });
    }

    Workspace& w_;
    const Model& model_;
    const Step& step_;
    StepAttention attention_;
    float* qkv_ = nullptr;       // [tokens, qkv_width()]
    float* gathered_ = nullptr;
};

}  // namespace quire
