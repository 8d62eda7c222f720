// The draw of a row's token: min-p, top-k, top-p and the random number, as `quire.sampling.filters` defines them.
//
// Weights become integers, and all sums are of integers: the token is the same whatever the order of addition.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace quire {

struct SamplingColumns {  // of each row; `quire.kernels.row_interface.SamplingTable`
    const int64_t* integers;  // seed, sequence index, top_k
    const double* floats;     // temperature, top_p, min_p
    int64_t integers_stride, floats_stride;
};

constexpr double kWeightOfLikeliest = 1099511627776.0;  // 2 to the 40th

static inline uint64_t splitmix(uint64_t state) {
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

// In [0, 1), of a seed, a sequence of the request, and a position.
static inline double chance_of(uint64_t seed, uint64_t sequence, uint64_t position) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
    const uint64_t stream = splitmix(splitmix(seed + kGolden) + (sequence + 1) * kGolden);
    return (double)(splitmix(stream + (position + 1) * kGolden) >> 11) * 0x1p-53;
}

// An integer in the order of the logits; of equal ones the lowest id is largest.
static inline int64_t ordering_key(float logit, int64_t id) {
    const float positive = logit + 0.0f;  // -0 becomes 0, which is its equal
    int32_t bits;
    std::memcpy(&bits, &positive, 4);
    const int32_t ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF);
    return (int64_t)((uint64_t)(int64_t)ascending << 32) - id;
}

class TokenDraw {
public:
    // logits, weights: [vocab]. distance: how far below the highest logit a weight is e times smaller.
    TokenDraw(const float* logits, const float* weights, int vocab, float highest, double distance, double min_p)
        : logits_(logits), weights_(weights), vocab_(vocab), highest_(highest), distance_(distance),
          least_((int64_t)std::ceil(min_p * kWeightOfLikeliest)) {}

    int64_t draw(double chance, int64_t top_k, double top_p) {
        int64_t total = 0;
        for (int v = 0; v < vocab_; v++) total += weight_of(v);
        if (top_k >= vocab_ && top_p >= 1.0) return find(chance, total, vocab_, [](int i) { return i; });
        keep_likeliest(top_k, top_p, total);
        total = sum(kept_.size());
        for (int64_t& key : kept_) key = id_of(key);
        std::sort(kept_.begin(), kept_.end());
        return find(chance, total, (int)kept_.size(), [this](int i) { return (int)kept_[i]; });
    }

private:
    static int id_of(int64_t key) { return (int)((uint64_t)-key & 0xFFFFFFFFu); }
    int64_t weight_of(int id) const {
        const int64_t weight = (int64_t)weights_[id];
        return weight < least_ ? 0 : weight;
    }
    int64_t sum(size_t count) const {
        int64_t total = 0;
        for (size_t i = 0; i < count; i++) total += weight_of(id_of(kept_[i]));
        return total;
    }

    // The first token, in the order of ids, at which the sum exceeds the goal.
    template <class Id>
    int64_t find(double chance, int64_t total, int count, const Id& id) const {
        const int64_t goal = std::min((int64_t)(chance * (double)total), total - 1);
        int64_t reached = 0;
        for (int i = 0; i < count; i++) {
            reached += weight_of(id(i));
            if (reached > goal) return id(i);
        }
        return vocab_ - 1;
    }

    // kept_: the keys of the top k, and of those the smallest set that reaches p. Few tokens matter: those close to the
    // likeliest are tried first, then more, then all.
    void keep_likeliest(int64_t top_k, double top_p, int64_t all) {
        for (const double close : {8.0, 18.0, std::numeric_limits<double>::infinity()}) {
            const float lowest = (float)(highest_ - close * distance_);
            kept_.clear();
            for (int v = 0; v < vocab_; v++)
                if (logits_[v] >= lowest) kept_.push_back(ordering_key(logits_[v], v));
            const bool enough = top_k < vocab_ ? (int64_t)kept_.size() >= top_k : sum(kept_.size()) >= share(all, top_p);
            if (enough) break;
        }
        if ((int64_t)kept_.size() > top_k) {
            std::nth_element(kept_.begin(), kept_.begin() + top_k, kept_.end(), std::greater<int64_t>());
            kept_.resize(top_k);
        }
        if (top_p >= 1.0) return;
        const int64_t goal = share(top_k < vocab_ ? sum(kept_.size()) : all, top_p);
        std::sort(kept_.begin(), kept_.end(), std::greater<int64_t>());
        size_t count = 0;
        for (int64_t reached = 0; count < kept_.size() && reached < goal; count++) reached += weight_of(id_of(kept_[count]));
        kept_.resize(std::max<size_t>(1, count));
    }
    static int64_t share(int64_t total, double top_p) { return top_p < 1.0 ? (int64_t)std::ceil((double)total * top_p) : total; }

    const float* logits_;
    const float* weights_;
    const int vocab_;
    const float highest_;
    const double distance_;
    const int64_t least_;
    std::vector<int64_t> kept_;
};

}  // namespace quire
