// A few threads that wait for the next piece of a step.
//
// Owns: `Team`. With one thread there is no other and nothing is locked. Who waits looks for the next piece for a few
// microseconds, and then sleeps: workers that share a machine must not burn each other's cores.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

class Team {
public:
    explicit Team(int size) {
        for (int i = 1; i < size; i++) others_.emplace_back([this, i] { serve(i); });
    }

    ~Team() {
        stop_ = true;
        round_.fetch_add(1);
        round_.notify_all();
        for (auto &other : others_) other.join();
    }

    int size() const { return 1 + (int)others_.size(); }

    // Calls piece(item, thread) for each item below `count`, in any order, and returns when all are done.
    template <class Piece> void each(long count, Piece piece) {
        if (others_.empty() || count < 2) {
            for (long item = 0; item < count; item++) piece(item, 0);
            return;
        }
        work_ = [&piece](long item, int thread) { piece(item, thread); };
        count_ = count;
        next_.store(0);
        busy_.store((int)others_.size());
        round_.fetch_add(1);
        round_.notify_all();
        take(0);
        for (int spin = 0; busy_.load() != 0; spin++) {
            int left = busy_.load();
            if (spin > SPINS && left != 0) busy_.wait(left);
            else rest();
        }
    }

private:
    static constexpr int SPINS = 200;

    static void rest() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void take(int thread) {
        for (long item; (item = next_.fetch_add(1)) < count_;) work_(item, thread);
    }

    void serve(int thread) {
        unsigned seen = 0;
        for (;;) {
            for (int spin = 0; round_.load() == seen; spin++) {
                if (spin > SPINS) round_.wait(seen);
                else rest();
            }
            seen++;
            if (stop_) return;
            take(thread);
            if (busy_.fetch_sub(1) == 1) busy_.notify_one();
        }
    }

    std::vector<std::thread> others_;
    std::function<void(long, int)> work_;
    long count_ = 0;
    std::atomic<long> next_{0};
    std::atomic<int> busy_{0};
    std::atomic<unsigned> round_{0};
    std::atomic<bool> stop_{false};
};
