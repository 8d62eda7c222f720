// What computes the rows of some tokens: all threads together, or one thread alone.
#pragma once
#include <cstdlib>
#include <vector>

#include "elementwise.h"
#include "gemm.h"

namespace quire {

class Buffer {  // grows; uninitialised
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
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

// Nanoseconds by kind of work, since the last `take`.
struct Profile {
    int64_t linear, attention, other;
    int64_t all() const { return linear + attention + other; }
};

class Timer {
public:
    explicit Timer(int64_t& total) : total_(total), began_(now_ns(CLOCK_MONOTONIC)) {}
    ~Timer() { total_ += now_ns(CLOCK_MONOTONIC) - began_; }

private:
    int64_t& total_;
    const int64_t began_;
};

struct Scratch {
    Buffer quantized, projected, gate_up, gated;
    Profile profile{};
    bool matrix_unit = false;
};

struct OneThread {  // as `ThreadPool`, without other threads
    int num_active() const { return 1; }
    template <class Body>
    void run(int count, const Body& body) {
        for (int task = 0; task < count; task++) body(task, 0);
    }
};

template <class Pool>
class Worker {
public:
    Worker(Pool& pool, Scratch& scratch) : scratch(scratch), pool_(pool) {}

    // x: [tokens, width_in]; out: [tokens, width_out].
    void multiply(const Linear& weight, const float* x, int64_t tokens, float* out) {
        Timer timer(scratch.profile.linear);
        linear(pool_, weight, rows(x, tokens, weight), tokens, out);
    }

    // activation(gate) * up. out: [tokens, width_out / 2]
    void multiply_and_gate(const Linear& weight, const float* x, int64_t tokens, int32_t activation, float* out) {
        const int width = weight.width_out / 2;
        float* gate_up;
        {
            Timer timer(scratch.profile.linear);
            const Rows all = rows(x, tokens, weight);
            if (gated_linear(pool_, weight, all, tokens, activation, out)) return;
            gate_up = scratch.gate_up.floats((size_t)tokens * 2 * width);
            linear(pool_, weight, all, tokens, gate_up);
        }
        each(tokens, [&](int64_t t) { gate(gate_up + t * 2 * width, width, activation, out + t * width); });
    }

    // Work that is neither a product nor attention.
    template <class Body>
    void each(int64_t tokens, const Body& body) {
        Timer timer(scratch.profile.other);
        each_token(tokens, body);
    }

    Scratch& scratch;

private:
    template <class Body>
    void each_token(int64_t tokens, const Body& body) {
        if (tokens < 8 || pool_.num_active() == 1) {
            for (int64_t t = 0; t < tokens; t++) body(t);
            return;
        }
        pool_.run((int)((tokens + 3) / 4), [&](int task, int) {
            for (int64_t t = 4 * task; t < std::min<int64_t>(4 * task + 4, tokens); t++) body(t);
        });
    }

    // Rows to multiply with: quantized first, if the weight is.
    Rows rows(const float* x, int64_t tokens, const Linear& weight) {
        const int width = weight.width_in, groups = width / kGroup;
        if (use_matrix_unit(tokens, weight)) return {x, {}, nullptr, to_tiles(x, tokens, width), width};
        if (!weight.quantized) return {x, {}, nullptr, nullptr, width};
        if (use_strips(tokens)) return {x, {}, quantize_strips(x, tokens, width), nullptr, width};
        auto* memory = static_cast<uint8_t*>(scratch.quantized.bytes((size_t)tokens * groups * (kGroupBytes + 16)));
        Quantized all;
        all.scales = reinterpret_cast<float*>(memory);
        all.sums = all.scales + tokens * groups;
        all.half_sums = reinterpret_cast<int32_t*>(all.sums + tokens * groups);
        all.codes = reinterpret_cast<int8_t*>(all.half_sums + 2 * tokens * groups);
        each_token(tokens, [&](int64_t t) { quantize_row(x + t * width, width, all.from(t, width)); });
        return {x, all, nullptr, nullptr, width};
    }
    bool use_matrix_unit(int64_t tokens, const Linear& weight) const {
        if constexpr (!kMatrixProducts) return false;
        if (!scratch.matrix_unit || tokens < kFewestMatrixTokens || weight.width_in % kGroup) return false;
        for (int s = 0; s < weight.num_segments; s++)
            if (weight.segments[s].format != kFloat32) return true;
        return false;
    }
    const uint16_t* to_tiles(const float* x, int64_t tokens, int width) {
        if constexpr (kMatrixProducts) {
            const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens + 1, numbers = (int64_t)width * kTileTokens;
            auto* all = static_cast<uint16_t*>(scratch.quantized.bytes(tiles * numbers * sizeof(uint16_t)));
            pool_.run((int)tiles - 1, [&](int tile, int) {
                const int64_t first = (int64_t)tile * kTileTokens;
                tile_tokens(x + first * width, (int)std::min<int64_t>(kTileTokens, tokens - first), width, width, all + tile * numbers);
            });
            return all;
        }
        return nullptr;
    }
    static bool use_strips(int64_t tokens) {
        if constexpr (kStripProducts) return tokens >= kFewestStripTokens;
        return false;
    }
    const int32_t* quantize_strips(const float* x, int64_t tokens, int width) {
        if constexpr (kStripProducts) {
            const int groups = width / kGroup;
            auto* all = static_cast<int32_t*>(scratch.quantized.bytes((size_t)tokens * groups * kStripWords * sizeof(int32_t)));
            pool_.run((int)((tokens + kStripTokens - 1) / kStripTokens), [&](int task, int) {
                const int64_t first = (int64_t)task * kStripTokens;
                each_strip(first, std::min<int64_t>(first + kStripTokens, tokens), [&](auto n, int64_t t) {
                    quantize_strip(x + t * width, width, reinterpret_cast<StripGroup<n>*>(all + t * groups * kStripWords));
                });
            });
            return all;
        }
        return nullptr;
    }

    Pool& pool_;
};

class Workspace {
public:
    // matrix_unit: whether many tokens are computed on one, if this CPU and its system have it.
    Workspace(int num_threads, bool matrix_unit) : pool(num_threads), own_(num_threads) {
        shared_.matrix_unit = matrix_unit && request_matrix_unit();
        for (Scratch& each : own_) each.matrix_unit = shared_.matrix_unit;
    }

    // Calls body(worker, first, count) for all tokens: with one worker for a few of them, which share the weights; for many,
    // block by block with a worker for each thread, so that the rows of a block stay in the cache of its core.
    template <class Body>
    void each_block(int64_t tokens, const Body& body) {
        const int threads = pool.num_active();
        if (tokens < (int64_t)threads * kFewestBlockTokens) return body(all, 0, tokens);
        const int64_t strips = (tokens + kBlockUnit - 1) / kBlockUnit, most = (int64_t)threads * kTokensAtOnce;
        const int blocks = (int)((tokens + most - 1) / most) * threads;
        const int64_t began = now_ns(CLOCK_MONOTONIC);
        const Profile before = own_[0].profile;
        pool.run(blocks, [&](int block, int thread) {
            const int64_t first = strips * block / blocks * kBlockUnit, last = std::min(tokens, strips * (block + 1) / blocks * kBlockUnit);
            OneThread alone;
            Worker<OneThread> worker(alone, own_[thread]);
            if (first < last) body(worker, first, last - first);
        });
        Profile& after = own_[0].profile;  // of the calling thread; that it waits for others counts as products
        after.linear += now_ns(CLOCK_MONOTONIC) - began - (after.all() - before.all());
    }

    // Runs a whole call; what it does between its parts counts as other work.
    template <class Body>
    void timed(const Body& body) {
        const int64_t began = now_ns(CLOCK_MONOTONIC), before = profile().all();
        control.before(pool);
        body();
        control.after(pool);
        shared_.profile.other += now_ns(CLOCK_MONOTONIC) - began - (profile().all() - before);
    }

    Profile profile() const {
        const Profile &one = shared_.profile, &other = own_[0].profile;
        return {one.linear + other.linear, one.attention + other.attention, one.other + other.other};
    }

    // Since the last call.
    Profile take_profile() {
        const Profile sum = profile();
        for (Scratch& each : own_) each.profile = {};
        shared_.profile = {};
        return sum;
    }

    ThreadPool pool;
    ThreadControl control;
    Buffer qkv, attended, gathered, embedded, normed, logits;

private:
    static constexpr int64_t kBlockUnit = kMatrixProducts ? kMatrixTokens : kStripTokens;
    static constexpr int64_t kFewestBlockTokens = 48;  // of each thread: with fewer, converting weights for each of them shows

    Scratch shared_;
    std::vector<Scratch> own_;  // of each thread

public:
    Worker<ThreadPool> all{pool, shared_};
};

}  // namespace quire
