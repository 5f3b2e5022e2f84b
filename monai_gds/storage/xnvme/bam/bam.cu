// NVMe reads that CUDA threads submit by themselves: the kernel of the backend xnvme-bam.
//
// One block of threads drives one queue pair, as the NVMe base specification defines it: submission entries of 64
// bytes, completion entries of 16 with a phase bit, a doorbell each for the tail and the head, PRP entries and lists.
// Every access to memory that the controller shares is volatile, and fenced before a doorbell is rung.
//
// Compiled by NVRTC, and for the host by the tests, which define what CUDA would provide.

typedef unsigned int u32;
typedef unsigned long long u64;

// The only command that is ever encoded.
constexpr u32 READ = 0x02;

constexpr u64 PAGE = 4096, LIST_ENTRIES = PAGE / 8;
constexpr u32 MOST_DEPTH = 1024;

// Results of a command besides the controller's own status: see queues.py.
constexpr int LOST = -1, STRANGE = -2, UNSENT = -3;

// A queue pair. What follows its depth is kept from one launch to the next; `since` is when something last completed.
struct Queue {
    u64 submission, completion, submission_doorbell, completion_doorbell;
    u32 depth, tail, head, phase, flying, failed;
    u64 since;
};

// Blocks to read into a slot of the pool.
struct Command {
    u64 lba;
    u32 blocks, slot;
};

// The identifiers of a queue pair. `ids` is a stack: with n commands in flight, the identifiers from ids[n] on are free.
struct Identifiers {
    u32 ids[MOST_DEPTH];
    int slots[MOST_DEPTH];  // of the command in flight, by identifier; -1: none
};

// What the host passes: `count` new commands, to be spread over the queues from queue `first` on. `results` are by slot.
// `over` is set by the first block that leaves, or by the host if it has more commands. `identifiers` are kept from one
// launch to the next. `pages` holds the controller's address of each page of the pool, `list_pages` of each page of
// `lists`. Each slot has one list of `list_entries`, a power of two, so that no list crosses a page.
struct Batch {
    Queue* queues;
    Identifiers* identifiers;
    const Command* commands;
    int* results;
    u32* over;
    const u64* pages;
    u64* lists;
    const u64* list_pages;
    u64 count, first, slot_pages, list_entries, block_bytes, nsid, limit_ns;
};

// Shared by the threads of a block.
struct Shared : Identifiers {
    u32 arrived, late, strange, over;
};

#ifdef __CUDACC__
__device__ u64 now()
{
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__device__ void rest() { __nanosleep(500); }
#endif

// The address of a command's data, as its two PRP entries.
__device__ void point(const Batch& batch, const Command& command, u64& first, u64& second)
{
    const u64* pages = batch.pages + command.slot * batch.slot_pages;
    const u64 count = (command.blocks * batch.block_bytes + PAGE - 1) / PAGE;
    first = pages[0];
    second = count > 1 ? pages[1] : 0;
    if (count <= 2) return;
    const u64 begin = command.slot * batch.list_entries;
    volatile u64* list = batch.lists + begin;
    for (u64 i = 1; i < count; i++) list[i - 1] = pages[i];
    second = batch.list_pages[begin / LIST_ENTRIES] + begin % LIST_ENTRIES * 8;
}

__device__ void encode(const Batch& batch, const Command& command, u32 id, volatile u32* entry)
{
    u64 first, second;
    point(batch, command, first, second);
    const u32 words[16] = {
        READ | id << 16, (u32)batch.nsid, 0, 0, 0, 0,
        (u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32),
        (u32)command.lba, (u32)(command.lba >> 32), command.blocks - 1, 0, 0, 0,
    };
    for (int i = 0; i < 16; i++) entry[i] = words[i];
}

__device__ void ring(u64 doorbell, u32 value) { *(volatile u32*)doorbell = value; }

// The last word of the i-th completion entry from the head on: identifier, phase bit, status. One load, never torn.
__device__ u32 completion(const Queue& queue, u32 i)
{
    return ((const volatile u32*)queue.completion)[(queue.head + i) % queue.depth * 4 + 3];
}

// Puts as many commands of the block's share, from `next` on, into its queue as there is room for. Returns how many.
__device__ u32 submit(const Batch& batch, Shared& shared, Queue& queue, u32 flying, u64 next)
{
    const u64 left = next < batch.count ? (batch.count - next + gridDim.x - 1) / gridDim.x : 0;
    const u32 room = queue.depth - 1 - flying, fresh = left < room ? (u32)left : room;
    for (u32 i = threadIdx.x; i < fresh; i += blockDim.x) {
        const u32 id = shared.ids[flying + i];
        const Command& command = batch.commands[next + (u64)i * gridDim.x];
        shared.slots[id] = (int)command.slot;
        encode(batch, command, id, (volatile u32*)queue.submission + (queue.tail + i) % queue.depth * 16);
    }
    queue.tail = (queue.tail + fresh) % queue.depth;
    return fresh;
}

// Keeps the identifiers for the next launch. If the queue failed, notes it of what has no result.
__device__ void keep(const Batch& batch, const Shared& shared, u32 most, bool failed, u64 next)
{
    Identifiers& kept = batch.identifiers[blockIdx.x];
    for (u32 i = threadIdx.x; i < most; i += blockDim.x) {
        kept.ids[i] = shared.ids[i];
        kept.slots[i] = shared.slots[i];
        if (failed && shared.slots[i] >= 0) batch.results[shared.slots[i]] = shared.strange ? STRANGE : LOST;
    }
    if (failed)
        for (u64 i = next + (u64)threadIdx.x * gridDim.x; i < batch.count; i += (u64)blockDim.x * gridDim.x)
            batch.results[batch.commands[i].slot] = UNSENT;
}

// Drives a block's queue: submits its share of the batch, which is every gridDim.x-th command, and takes completions
// until the host has something to do: a command of any queue has completed, or more commands have come. What is in
// flight then stays so, and the next launch takes its completion. Where nothing completes for `limit_ns`, the block
// gives up, and what is in flight is lost. The loops of all threads take the same turns.
__device__ void drive(const Batch& batch, Shared& shared)
{
    Queue queue = batch.queues[blockIdx.x];
    const Identifiers& kept = batch.identifiers[blockIdx.x];
    const bool leads = threadIdx.x == 0;
    const u32 depth = queue.depth, most = depth - 1;  // a full queue would look empty
    u32 flying = queue.flying;
    u64 next = (blockIdx.x + gridDim.x - batch.first) % gridDim.x;
    if (!flying) queue.since = now();
    for (u32 i = threadIdx.x; i < most; i += blockDim.x) {
        shared.ids[i] = flying ? kept.ids[i] : i;
        shared.slots[i] = flying ? kept.slots[i] : -1;
    }
    if (leads) shared.strange = 0;
    __syncthreads();

    bool over = false, failed = false;
    while ((flying || next < batch.count) && !over && !failed) {
        const u32 fresh = submit(batch, shared, queue, flying, next);
        flying += fresh;
        next += (u64)fresh * gridDim.x;
        if (leads) {
            shared.arrived = flying;
            shared.late = now() - queue.since > batch.limit_ns;
            shared.over = *(volatile u32*)batch.over;
        }
        __threadfence_system();
        __syncthreads();

        if (leads && fresh) ring(queue.submission_doorbell, queue.tail);
        for (u32 i = threadIdx.x; i < flying; i += blockDim.x) {
            const u32 expected = queue.head + i < depth ? queue.phase : queue.phase ^ 1;
            if ((completion(queue, i) >> 16 & 1) != expected) {
                atomicMin(&shared.arrived, i);
                break;
            }
        }
        __syncthreads();

        const u32 arrived = shared.arrived, late = shared.late;
        over = next >= batch.count && (arrived || shared.over);
        for (u32 i = threadIdx.x; i < arrived; i += blockDim.x) {
            const u32 word = completion(queue, i), id = word & 0xffff;
            const int slot = id < most ? atomicExch(&shared.slots[id], -1) : -1;
            if (slot < 0) {
                atomicExch(&shared.strange, 1u);
                continue;
            }
            batch.results[slot] = (int)(word >> 16 & 0xfffe);
            shared.ids[flying - arrived + i] = id;
        }
        __threadfence_system();
        __syncthreads();

        flying -= arrived;
        if (queue.head + arrived >= depth) queue.phase ^= 1;
        queue.head = (queue.head + arrived) % depth;
        if (leads && arrived) {
            ring(queue.completion_doorbell, queue.head);
            queue.since = now();
        }
        failed = shared.strange || (late && !arrived);
        if (!arrived) rest();
    }

    keep(batch, shared, most, failed, next);
    if (!leads) return;
    queue.flying = flying;
    queue.failed = failed;
    batch.queues[blockIdx.x] = queue;
    if (over || failed) *(volatile u32*)batch.over = 1;
}

#ifdef __CUDACC__
extern "C" __global__ void read_blocks(const Batch* batch)
{
    __shared__ Shared shared;
    const Batch own = *batch;  // it lies in host memory
    drive(own, shared);
}
#endif
