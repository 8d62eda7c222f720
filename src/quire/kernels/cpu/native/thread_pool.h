// A pool of threads for loops of independent tasks. A thread that waits spins for some microseconds, then sleeps.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace quire {

static inline int64_t now_ns(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

class ThreadPool {
public:
    explicit ThreadPool(int num_threads) : num_threads_(num_threads) {
        for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
    }
    ~ThreadPool() {
        stopping_.store(true);
        num_active_ = num_threads_;
        start();
        for (auto& thread : threads_) thread.join();
    }
    ThreadPool(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }

    // How many threads compute, of those that exist. Only between loops.
    void set_active(int count) { num_active_ = count < 1 ? 1 : count > num_threads_ ? num_threads_ : count; }
    int num_active() const { return num_active_; }

    // How long a waiting thread spins before it sleeps.
    void set_spin(int64_t ns) { spin_ns_.store(ns, std::memory_order_relaxed); }

    // How long the calling thread has waited for others since the last call, and how much of that it slept.
    struct Waited { int64_t all_ns, asleep_ns; };
    Waited take_waited() {
        const Waited waited = waited_;
        waited_ = {0, 0};
        return waited;
    }

    // Calls body(task, thread) for each task from 0 to count - 1, and returns when all are done.
    template <class Body>
    void run(int count, const Body& body) {
        if (count <= 1 || num_active_ == 1) {
            for (int task = 0; task < count; task++) body(task, 0);
            return;
        }
        body_ = &body;
        call_ = [](const void* b, int task, int thread) { (*static_cast<const Body*>(b))(task, thread); };
        count_ = count;
        next_.store(0, std::memory_order_relaxed);
        unfinished_.store(num_active_ - 1, std::memory_order_relaxed);
        start();
        take_tasks(0);
        wait_for_others();
    }

private:
    void start() {
        generation_.store(++num_loops_ << kActiveBits | (uint32_t)num_active_, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) > 0) wake(generation_);
    }
    void take_tasks(int thread) {
        for (int task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(body_, task, thread);
    }
    void work(int thread) {
        uint32_t seen = 0;
        for (;;) {
            seen = wait_for_work(seen);
            if (stopping_.load()) return;
            // Of this loop: a thread that was left out may be late, and num_active_ is that of the next loop already.
            if (thread >= (int)(seen & ((1u << kActiveBits) - 1))) continue;
            take_tasks(thread);
            if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_asleep_.load(std::memory_order_seq_cst))
                wake(unfinished_);
        }
    }
    uint32_t wait_for_work(uint32_t seen) {
        int64_t until = 0;
        for (int i = 0;; i++) {
            const uint32_t now = generation_.load(std::memory_order_acquire);
            if (now != seen) return now;
            relax();
            if (i % 64) continue;
            const int64_t time = now_ns(CLOCK_MONOTONIC);
            if (!until) until = time + spin_ns_.load(std::memory_order_relaxed);
            if (time < until) continue;
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            if (generation_.load(std::memory_order_seq_cst) == seen) sleep(generation_, seen);
            num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }
    void wait_for_others() {
        if (!unfinished_.load(std::memory_order_acquire)) return;
        const int64_t began = now_ns(CLOCK_MONOTONIC);
        const int64_t until = began + spin_ns_.load(std::memory_order_relaxed);
        for (int i = 1;; i++) {
            const uint32_t left = unfinished_.load(std::memory_order_acquire);
            if (!left) break;
            relax();
            if (i % 64 || now_ns(CLOCK_MONOTONIC) < until) continue;
            caller_asleep_.store(true, std::memory_order_seq_cst);
            const uint32_t now = unfinished_.load(std::memory_order_seq_cst);
            const int64_t asleep = now_ns(CLOCK_MONOTONIC);
            if (now) sleep(unfinished_, now);
            waited_.asleep_ns += now_ns(CLOCK_MONOTONIC) - asleep;
            caller_asleep_.store(false, std::memory_order_seq_cst);
        }
        waited_.all_ns += now_ns(CLOCK_MONOTONIC) - began;
    }
    static void sleep(std::atomic<uint32_t>& word, uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    }
    static void wake(std::atomic<uint32_t>& word) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
    }

    static constexpr int kActiveBits = 10;
    const int num_threads_;
    uint32_t num_loops_ = 0;
    std::atomic<int> num_active_{num_threads_};
    const void* body_ = nullptr;
    void (*call_)(const void*, int, int) = nullptr;
    int count_ = 0;
    Waited waited_{0, 0};
    std::atomic<int64_t> spin_ns_{50000};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};  // the number of the loop, and in the low bits how many threads compute it
    alignas(64) std::atomic<uint32_t> unfinished_{0};
    alignas(64) std::atomic<int> num_asleep_{0};
    std::atomic<bool> caller_asleep_{false};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

// Chooses how many threads compute. Where other programs want the cores, threads wait for one another more than they
// compute, and fewer are faster: the number is halved, and all are tried again after a time that doubles.
class ThreadControl {
public:
    void set_fixed(bool fixed) { fixed_ = fixed; }

    void before(ThreadPool& pool) {
        if (fixed_ || pool.num_threads() == 1) return;
        began_ns_ = now_ns(CLOCK_MONOTONIC);
        began_cpu_ns_ = now_ns(CLOCK_THREAD_CPUTIME_ID);
        if (pool.num_active() < pool.num_threads() && began_ns_ >= retry_ns_) {
            pool.set_active(pool.num_threads());
            forget();
        }
    }

    void after(ThreadPool& pool) {
        const ThreadPool::Waited waited = pool.take_waited();
        if (fixed_ || pool.num_active() == 1) return;
        const int64_t now = now_ns(CLOCK_MONOTONIC), elapsed = now - began_ns_;
        const int64_t cpu = now_ns(CLOCK_THREAD_CPUTIME_ID) - began_cpu_ns_;
        const int64_t preempted = elapsed - cpu - waited.asleep_ns;
        elapsed_ns_ += elapsed;
        lost_ns_ += waited.all_ns + (preempted > 0 ? preempted : 0);
        if (elapsed_ns_ < kWindowNs) return;
        if (lost_ns_ * 100 > elapsed_ns_ * kLostPercent) {
            pool.set_active(pool.num_active() / 2);
            retry_ns_ = now + patience_ns_;
            patience_ns_ = patience_ns_ * 2 > kMaxPatienceNs ? kMaxPatienceNs : patience_ns_ * 2;
        } else {
            patience_ns_ = kMinPatienceNs;
        }
        forget();
    }

private:
    static constexpr int64_t kWindowNs = 30000000, kMinPatienceNs = 500000000, kMaxPatienceNs = 8000000000;
    static constexpr int64_t kLostPercent = 50;  // then half of the threads, which lose less, compute as much

    void forget() { elapsed_ns_ = lost_ns_ = 0; }

    bool fixed_ = false;
    int64_t began_ns_ = 0, began_cpu_ns_ = 0, elapsed_ns_ = 0, lost_ns_ = 0, retry_ns_ = 0;
    int64_t patience_ns_ = kMinPatienceNs;
};

}  // namespace quire
