// The kernel of xnvme-bam compiled for the host: what CUDA brings, in terms of the C++ library. Each thread of a block is
// a thread of the process, and blocks run side by side.

#include <atomic>
#include <barrier>
#include <chrono>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#define __device__ static

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static thread_local std::barrier<>* others;

static void __syncthreads() { others->arrive_and_wait(); }
static void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

static unsigned atomicMin(unsigned* at, unsigned value)
{
    std::atomic_ref<unsigned> cell(*at);
    unsigned old = cell.load();
    while (value < old && !cell.compare_exchange_weak(old, value)) {}
    return old;
}

template <typename T> static T atomicExch(T* at, T value) { return std::atomic_ref<T>(*at).exchange(value); }

static unsigned long long now()
{
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The processors are few, and the software controller needs one.
static void rest() { std::this_thread::sleep_for(std::chrono::microseconds(20 * gridDim.x * blockDim.x)); }

#include KERNEL

extern "C" void read_blocks(const Batch* batch, unsigned blocks, unsigned threads)
{
    std::vector<std::unique_ptr<Shared>> shared;
    std::deque<std::barrier<>> barriers;
    std::vector<std::thread> running;
    for (unsigned block = 0; block < blocks; block++) {
        shared.push_back(std::make_unique<Shared>());
        barriers.emplace_back(threads);
        for (unsigned thread = 0; thread < threads; thread++)
            running.emplace_back([=, shared = shared.back().get(), barrier = &barriers.back()] {
                threadIdx = {thread}, blockIdx = {block}, blockDim = {threads}, gridDim = {blocks};
                others = barrier;
                drive(*batch, *shared);
            });
    }
    for (auto& one : running) one.join();
}
