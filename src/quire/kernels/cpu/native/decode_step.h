// One step in which rows decode, in one call: inputs from the row table, layers and logits; where rows are greedy, their
// tokens and ends too, of drafts as well.
#pragma once
#include <numeric>

#include "decoder.h"

namespace quire {

struct RopeTable {
    const float* cos;  // [positions, rotary], and for LongRoPE a second table behind the first
    const float* sin;
    int64_t num_positions;  // of one table
    int64_t long_from;      // sequences that may be longer use the second table; 0: there is one
    int32_t rotary;
    int32_t reserved;
};

struct RowColumns {  // indexed by row; the last four may change
    const int32_t* tables;
    int64_t table_width;
    const int64_t* max_lengths;
    const int64_t* end_ids;  // [rows, num_end_ids], padded with -1
    const int64_t* end_lengths;
    int64_t num_end_ids, end_length_stride;
    int64_t* last_tokens;
    int64_t* lengths;
    bool* alive;
};

struct Drafts {  // of each row of a step, one row after the other
    const int32_t* counts;
    const int64_t* tokens;
};

struct Tables {  // what a decoder has beside its layers
    const Linear* embedding;
    const Linear* head;
    RopeTable ropes[2];
    int32_t num_ropes, vocab;
    float embedding_scale, softcap;
};

// The highest of a row, and the lowest index that has it. NaN if any is.
static inline float highest_of(const float* x, int count, int64_t& index) {
    Simd::Float high = Simd::load(x), invalid = Simd::zero();
    int i = 0;
    if (count < Simd::kLanes) high = Simd::set(x[0]);
    for (; i + Simd::kLanes <= count; i += Simd::kLanes) {
        const Simd::Float values = Simd::load(x + i);
        high = Simd::maximum(high, values);
        invalid = Simd::multiply_add(values, Simd::zero(), invalid);
    }
    float best = Simd::highest(high);
    bool finite = Simd::sum(invalid) == 0.0f;
    for (; i < count; i++) best = std::max(best, x[i]);
    if (!finite || !(best - best == 0.0f)) {  // rare: a value is NaN or infinite
        for (i = 0; i < count; i++)
            if (x[i] != x[i] || x[i] == std::numeric_limits<float>::infinity()) return std::numeric_limits<float>::quiet_NaN();
        best = *std::max_element(x, x + count);
    }
    for (index = 0; x[index] != best; index++) {}
    return best;
}

// Rows that are not alive are left out.
class DecodeStep {
public:
    DecodeStep(Workspace& workspace, const Model& model, const Tables& tables, const RowColumns& columns)
        : w_(workspace), model_(model), tables_(tables), columns_(columns) {}

    // rows: [count]; step: the place and the strides of the KV store; the rest is filled here. Rows get their likeliest
    // token. outcome: [5, count]: token, alive before, finite, stop, length. tokens: [count]. Whether all have one and go on.
    bool run_greedy(const int32_t* rows, int count, const Step& step, int64_t* outcome, int32_t* tokens) {
        std::fill(outcome, outcome + 5 * (int64_t)count, 0);
        const std::vector<Likeliest> likeliest = likeliest_of(run(rows, count, nullptr, step));
        bool all_go_on = (int)places_.size() == count;
        for (size_t i = 0; i < places_.size(); i++) all_go_on &= finish(rows[places_[i]], likeliest[i], outcome + places_[i], count);
        std::copy(outcome, outcome + count, tokens);
        return all_go_on;
    }

    // The same of rows with drafts: a row gets tokens as long as they are those drafted. outcome: [5, count + drafts], of
    // each row itself and then of its drafts; advances: how many of these it has.
    void verify_greedy(const int32_t* rows, int count, const Drafts& drafts, const Step& step, int64_t* outcome, int32_t* advances) {
        const int stride = count + std::accumulate(drafts.counts, drafts.counts + count, 0);
        std::fill(outcome, outcome + 5 * (int64_t)stride, 0);
        std::fill(advances, advances + count, 0);
        const std::vector<Likeliest> likeliest = likeliest_of(run(rows, count, &drafts, step));
        const Likeliest* next = likeliest.data();
        const int64_t* tokens = drafts.tokens;
        for (int i = 0; i < count; tokens += drafts.counts[i], outcome += 1 + drafts.counts[i], i++) {
            const int64_t row = rows[i];
            for (int n = 0; columns_.alive[row] && n <= drafts.counts[i]; n++) {
                finish(row, next[n], outcome + n, stride);
                advances[i]++;
                if (n == drafts.counts[i] || outcome[n] != tokens[n]) break;
            }
            if (advances[i] > 0) next += 1 + drafts.counts[i];
        }
    }

    // out: [count, vocab], zeros for rows that are not alive.
    void run_logits(const int32_t* rows, int count, const Step& step, float* out) {
        const float* logits = run(rows, count, nullptr, step);
        Timer timer(w_.all.scratch.profile.other);
        if ((int)places_.size() < count) std::fill(out, out + (int64_t)count * tables_.vocab, 0.0f);
        for (size_t i = 0; i < places_.size(); i++)
            std::copy(logits + i * tables_.vocab, logits + (i + 1) * tables_.vocab, out + (int64_t)places_[i] * tables_.vocab);
    }

private:
    struct Likeliest { float logit; int64_t token; };

    // Of each token of the step, what may follow it.
    std::vector<Likeliest> likeliest_of(const float* logits) {
        std::vector<Likeliest> likeliest(num_tokens_);
        w_.all.each(num_tokens_, [&](int64_t i) { likeliest[i].logit = highest_of(logits + i * tables_.vocab, tables_.vocab, likeliest[i].token); });
        return likeliest;
    }
    // The logits of the rows that are alive, of each also of its drafts.
    const float* run(const int32_t* rows, int count, const Drafts* drafts, Step step) {
        for (int i = 0; i < count; i++)
            if (columns_.alive[rows[i]]) places_.push_back(i);
        if (places_.empty()) return nullptr;
        build(rows, drafts, step);
        const int n = num_tokens_ = step.num_tokens;
        float* normed = w_.normed.floats((size_t)n * model_.hidden);  // a draft has the attention of a token without drafts
        Forward(w_, model_, step, false).run(w_.embedded.floats((size_t)n * model_.hidden), normed);
        float* logits = w_.logits.floats((size_t)n * tables_.vocab);
        w_.all.multiply(*tables_.head, normed, n, logits);
        w_.all.each(n, [&](int64_t i) { cap(logits + i * tables_.vocab); });
        return logits;
    }
    void build(const int32_t* rows, const Drafts* drafts, Step& step) {
        const int num_sequences = (int)places_.size();
        lengths_.resize(num_sequences);
        starts_.resize(num_sequences + 1);
        block_tables_.resize(num_sequences * columns_.table_width);
        for (int i = 0; i < num_sequences; i++) starts_[i + 1] = starts_[i] + 1 + (drafts ? drafts->counts[places_[i]] : 0);
        const int n = starts_[num_sequences];
        slots_.resize(n);
        for (int r = 0; r < tables_.num_ropes; r++) rotations_[r].resize((size_t)2 * n * tables_.ropes[r].rotary);
        float* embedded = w_.embedded.floats((size_t)n * model_.hidden);
        const int64_t* next = drafts ? drafts->tokens : nullptr;  // of the row at place `place`
        for (int i = 0, place = 0; i < num_sequences; i++) {
            const int64_t row = rows[places_[i]], length = columns_.lengths[row];
            const int32_t* table = columns_.tables + row * columns_.table_width;
            const int num_drafts = starts_[i + 1] - starts_[i] - 1;
            for (; drafts && place < places_[i]; place++) next += drafts->counts[place];
            for (int d = 0; d <= num_drafts; d++) {
                const int t = starts_[i] + d;
                const int64_t position = length - 1 + d;
                slots_[t] = (int64_t)table[position / step.block_size] * step.block_size + position % step.block_size;
                for (int r = 0; r < tables_.num_ropes; r++) rotation(r, row, position, t, n);
                embed(*tables_.embedding, d == 0 ? columns_.last_tokens[row] : next[d - 1], tables_.embedding_scale, embedded + (int64_t)t * model_.hidden);
            }
            lengths_[i] = (int32_t)(length + num_drafts);
            std::copy(table, table + (length + num_drafts - 1) / step.block_size + 1, block_tables_.data() + i * columns_.table_width);
        }
        step.num_tokens = n;
        step.num_sequences = num_sequences;
        step.slots = slots_.data();
        step.tables = block_tables_.data();
        step.table_width = columns_.table_width;
        step.starts = starts_.data();
        step.lengths = lengths_.data();
        step.selected = nullptr;
        for (int r = 0; r < tables_.num_ropes; r++) {
            step.rotary[r] = tables_.ropes[r].rotary;
            step.cos[r] = rotations_[r].data();
            step.sin[r] = rotations_[r].data() + (size_t)n * step.rotary[r];
        }
    }
    void rotation(int r, int64_t row, int64_t position, int i, int n) {
        const RopeTable& rope = tables_.ropes[r];
        const bool long_table = rope.long_from > 0 && columns_.max_lengths[row] > rope.long_from;
        const int64_t at = (position + (long_table ? rope.num_positions : 0)) * rope.rotary;
        std::copy(rope.cos + at, rope.cos + at + rope.rotary, rotations_[r].data() + (size_t)i * rope.rotary);
        std::copy(rope.sin + at, rope.sin + at + rope.rotary, rotations_[r].data() + (size_t)(n + i) * rope.rotary);
    }
    void cap(float* logits) const {
        if (tables_.softcap > 0.0f)
            for (int v = 0; v < tables_.vocab; v++) logits[v] = tables_.softcap * std::tanh(logits[v] / tables_.softcap);
    }
    // Whether the row goes on.
    bool finish(int64_t row, const Likeliest& likeliest, int64_t* outcome, int stride) {
        const bool finite = likeliest.logit - likeliest.logit == 0.0f;
        const int64_t token = finite ? likeliest.token : 0;
        const int64_t* ends = columns_.end_ids + row * columns_.num_end_ids;
        const bool stop = std::find(ends, ends + columns_.num_end_ids, token) != ends + columns_.num_end_ids;
        const bool full = columns_.lengths[row] + 1 >= columns_.end_lengths[row * columns_.end_length_stride];
        if (finite) {
            columns_.last_tokens[row] = token;
            columns_.lengths[row] += 1;
        }
        columns_.alive[row] = finite && !stop && !full;
        const int64_t values[5] = {token, 1, finite, stop, full && !stop};
        for (int k = 0; k < 5; k++) outcome[(int64_t)k * stride] = values[k];
        return columns_.alive[row];
    }

    Workspace& w_;
    const Model& model_;
    const Tables& tables_;
    const RowColumns& columns_;
    std::vector<int> places_;
    int num_tokens_ = 0;  // of the rows that are alive
    std::vector<int64_t> slots_;
    std::vector<int32_t> lengths_, starts_, block_tables_;
    std::vector<float> rotations_[2];
};

}  // namespace quire
