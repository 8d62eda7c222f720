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

    // Time for which the calling thread has waited for others, since the last call.
    int64_t take_waited_ns() {
        const int64_t waited = waited_ns_;
        waited_ns_ = 0;
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
        generation_.fetch_add(1, std::memory_order_seq_cst);
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
            if (thread >= num_active_) continue;
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
            if (now) sleep(unfinished_, now);
            caller_asleep_.store(false, std::memory_order_seq_cst);
        }
        waited_ns_ += now_ns(CLOCK_MONOTONIC) - began;
    }
    static void sleep(std::atomic<uint32_t>& word, uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    }
    static void wake(std::atomic<uint32_t>& word) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
    }

    const int num_threads_;
    std::atomic<int> num_active_{num_threads_};
    const void* body_ = nullptr;
    void (*call_)(const void*, int, int) = nullptr;
    int count_ = 0;
    int64_t waited_ns_ = 0;
    std::atomic<int64_t> spin_ns_{50000};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<uint32_t> unfinished_{0};
    alignas(64) std::atomic<int> num_asleep_{0};
    std::atomic<bool> caller_asleep_{false};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

}  // namespace quire
