// All layers of a decoder for one step, in one call.
#pragma once
#include <cstdlib>
#include <memory>

#include "attention.h"
#include "gemm.h"
#include "pack.h"

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
    int32_t num_selected, reserved;
};

static inline KvLayer layer_of(const Step& step, int index) {
    return {step.kv + index * step.layer_stride * number_bytes(step.kv_format), step.block_stride, step.value_stride,
            step.token_stride, step.head_stride, step.kv_format, step.block_size};
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
    const int64_t block = step.slots[t] / kv.block_size, bytes = number_bytes(kv.format);
    const int offset = (int)(step.slots[t] % kv.block_size);
    for (int h = 0; h < heads.keys; h++) {
        const float* key = qkv + (int64_t)(heads.queries + h) * heads.dim;
        alignas(64) uint8_t numbers[4 * kMaxDim];
        store_numbers(key, kv.format, heads.dim, numbers);
        uint8_t* keys = keys_of(kv, block, h, heads.dim) + offset * bytes;
        for (int d = 0; d < heads.dim; d++) std::memcpy(keys + (int64_t)d * kv.block_size * bytes, numbers + d * bytes, bytes);
        store_numbers(key + (int64_t)heads.keys * heads.dim, kv.format, heads.dim, value_of(kv, block, offset, h));
    }
}

// Nanoseconds by kind of work, since the last `take`.
struct Profile { int64_t linear, attention, other; };

// One row of a packed matrix as float32, times a factor.
static inline void embed(const Linear& weight, int64_t row, float factor, float* out) {
    const Segment* segment = weight.segments;
    while (row >= segment->first_row + segment->num_rows) segment++;
    const int64_t inside = row - segment->first_row;
    const uint8_t* panel = segment->data + inside / kPanelRows * panel_bytes(segment->format, weight.width_in);
    unpack_row(segment->format, panel, weight.width_in, (int)(inside % kPanelRows), out);
    if (factor != 1.0f) scale_row(out, factor, weight.width_in);
}

class Buffer {  // grows, and keeps what it has; uninitialised
public:
    ~Buffer() { std::free(data_); }
    float* floats(size_t count) { return static_cast<float*>(bytes(count * sizeof(float))); }
    void* bytes(size_t count) {
        if (count > size_) {
            std::free(data_);
            size_ = (count + 4095) / 4096 * 4096;
            data_ = std::aligned_alloc(64, size_);
        }
        return data_;
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

class Workspace {
public:
    explicit Workspace(int num_threads) : pool(num_threads) {}

    // Rows to multiply with: quantized first, if the weight is.
    Rows rows(const float* x, int64_t tokens, int width, bool quantized) {
        if (!quantized) return {x, {}, nullptr, width};
        const int groups = width / kGroup;
        if (use_strips(tokens)) return {x, {}, quantize_strips(x, tokens, width), width};
        auto* memory = static_cast<uint8_t*>(quantized_.bytes((size_t)tokens * groups * (kGroupBytes + 16)));
        Quantized all;
        all.scales = reinterpret_cast<float*>(memory);
        all.sums = all.scales + tokens * groups;
        all.half_sums = reinterpret_cast<int32_t*>(all.sums + tokens * groups);
        all.codes = reinterpret_cast<int8_t*>(all.half_sums + 2 * tokens * groups);
        each_token(tokens, [&](int64_t t) { quantize_row(x + t * width, width, all.from(t, width)); });
        return {x, all, nullptr, width};
    }

    template <class Body>
    void each_token(int64_t tokens, const Body& body) {
        if (tokens < 8) {
            for (int64_t t = 0; t < tokens; t++) body(t);
            return;
        }
        pool.run((int)((tokens + 3) / 4), [&](int task, int) {
            for (int64_t t = 4 * task; t < std::min<int64_t>(4 * task + 4, tokens); t++) body(t);
        });
    }

    ThreadPool pool;
    ThreadControl control;
    Profile profile{};
    Buffer qkv, attended, projected, gate_up, gated, gathered, embedded, normed, logits;

private:
    static bool use_strips(int64_t tokens) {
        if constexpr (kStripProducts) return tokens >= kFewestStripTokens;
        return false;
    }
    const int32_t* quantize_strips(const float* x, int64_t tokens, int width) {
        if constexpr (kStripProducts) {
            const int groups = width / kGroup;
            auto* all = static_cast<int32_t*>(quantized_.bytes((size_t)tokens * groups * kStripWords * sizeof(int32_t)));
            pool.run((int)((tokens + kStripTokens - 1) / kStripTokens), [&](int task, int) {
                const int64_t first = (int64_t)task * kStripTokens;
                each_strip(first, std::min<int64_t>(first + kStripTokens, tokens), [&](auto n, int64_t t) {
                    quantize_strip(x + t * width, width, reinterpret_cast<StripGroup<n>*>(all + t * groups * kStripWords));
                });
            });
            return all;
        }
        return nullptr;
    }

    Buffer quantized_;
};

class Timer {
public:
    explicit Timer(int64_t& total) : total_(total), began_(now_ns(CLOCK_MONOTONIC)) {}
    ~Timer() { total_ += now_ns(CLOCK_MONOTONIC) - began_; }

private:
    int64_t& total_;
    const int64_t began_;
};

constexpr int64_t kMlpTokens = 256;  // tokens at once, to bound the memory of wide layers

class Forward {
public:
    Forward(Workspace& workspace, const Model& model, const Step& step)
        : w_(workspace), model_(model), step_(step),
          attention_(model.heads, step.num_sequences, step.tables, step.table_width, step.starts, step.lengths) {}

    // residual: [tokens, hidden], embedded; out: [selected or tokens, hidden].
    void run(float* residual, float* out) {
        const int width = model_.hidden;
        int64_t tokens = step_.num_tokens;
        each(tokens, [&](int64_t t) { rms_norm(residual + t * width, model_.layers[0].attention_norm, width, model_.epsilon, out_row(out, t)); });
        normed_ = out;
        for (int index = 0; index < model_.num_layers; index++) {
            const Layer& layer = model_.layers[index];
            const bool last = index + 1 == model_.num_layers;
            const float* attended = attend(layer, index, tokens);
            if (last && step_.selected) {
                attended = gather(attended, residual);
                tokens = step_.num_selected;
                residual = gathered_;
            }
            float* projected = w_.projected.floats((size_t)tokens * width);
            multiply(layer.output, attended, tokens, projected);
            close(projected, residual, layer.attention_post_norm, layer.mlp_norm, tokens, out);
            const float* next = last ? model_.final_norm : model_.layers[index + 1].attention_norm;
            for (int64_t t = 0; t < tokens; t += kMlpTokens)
                mlp(layer, residual + t * width, next, std::min(kMlpTokens, tokens - t), out + t * width);
        }
    }

private:
    float* out_row(float* out, int64_t t) const { return out + t * model_.hidden; }

    template <class Body>
    void each(int64_t tokens, const Body& body) {
        Timer timer(w_.profile.other);
        w_.each_token(tokens, body);
    }

    void multiply(const Linear& weight, const float* x, int64_t tokens, float* out) {
        Timer timer(w_.profile.linear);
        linear(w_.pool, weight, w_.rows(x, tokens, weight.width_in, weight.quantized), tokens, out);
    }

    const float* attend(const Layer& layer, int index, int64_t tokens) {
        const Heads& heads = model_.heads;
        const int64_t stride = (int64_t)(heads.queries + 2 * heads.keys) * heads.dim;
        float* qkv = w_.qkv.floats(tokens * stride);
        multiply(layer.qkv, normed_, tokens, qkv);
        const KvLayer kv = layer_of(step_, index);
        each(tokens, [&](int64_t t) { rotate_and_write(heads, step_, kv, layer.rope, layer.head_norm, model_.head_epsilon, t, qkv + t * stride); });
        Timer timer(w_.profile.attention);
        float* attended = w_.attended.floats((size_t)tokens * heads.queries * heads.dim);
        attention_.attend(w_.pool, kv, layer.window, qkv, stride, attended);
        return attended;
    }

    // The selected rows of what was attended, and of the residual.
    const float* gather(const float* attended, const float* residual) {
        const int width = model_.heads.queries * model_.heads.dim, count = step_.num_selected;
        gathered_ = w_.gathered.floats((size_t)count * (width + model_.hidden));
        float* rows = gathered_ + (size_t)count * model_.hidden;
        for (int i = 0; i < count; i++) {
            const int64_t t = step_.selected[i];
            std::copy(residual + t * model_.hidden, residual + (t + 1) * model_.hidden, gathered_ + (size_t)i * model_.hidden);
            std::copy(attended + t * width, attended + (t + 1) * width, rows + (size_t)i * width);
        }
        return rows;
    }

    // The end of one half of a layer: post norm, residual, next norm.
    void close(float* x, float* residual, const float* post_norm, const float* next_norm, int64_t tokens, float* out) {
        const int width = model_.hidden;
        each(tokens, [&](int64_t t) {
            float* row = x + t * width;
            if (post_norm) rms_norm(row, post_norm, width, model_.epsilon, row);
            add_row(residual + t * width, row, width);
            rms_norm(residual + t * width, next_norm, width, model_.epsilon, out_row(out, t));
        });
    }

    void mlp(const Layer& layer, float* residual, const float* next_norm, int64_t tokens, float* normed) {
        float* gated = w_.gated.floats((size_t)tokens * model_.ffn);
        multiply_and_gate(layer.gate_up, normed, tokens, gated);
        float* projected = w_.projected.floats((size_t)tokens * model_.hidden);
        multiply(layer.down, gated, tokens, projected);
        close(projected, residual, layer.mlp_post_norm, next_norm, tokens, normed);
    }

    void multiply_and_gate(const Linear& weight, const float* x, int64_t tokens, float* out) {
        float* gate_up;
        {
            Timer timer(w_.profile.linear);
            const Rows rows = w_.rows(x, tokens, weight.width_in, weight.quantized);
            if (gated_linear(w_.pool, weight, rows, tokens, model_.activation, out)) return;
            gate_up = w_.gate_up.floats((size_t)tokens * 2 * model_.ffn);
            linear(w_.pool, weight, rows, tokens, gate_up);
        }
        each(tokens, [&](int64_t t) { gate(gate_up + t * 2 * model_.ffn, model_.ffn, model_.activation, out + t * model_.ffn); });
    }

    Workspace& w_;
    const Model& model_;
    const Step& step_;
    StepAttention attention_;
    const float* normed_ = nullptr;
    float* gathered_ = nullptr;
};

}  // namespace quire
