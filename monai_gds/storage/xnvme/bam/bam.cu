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
constexpr int LOST = -1, STRANGE = -2;

// A queue pair. The last three are kept from one launch to the next.
struct Queue {
    u64 submission, completion, submission_doorbell, completion_doorbell;
    u32 depth, tail, head, phase;
};

// Blocks to read into a slot of the pool.
struct Command {
    u64 lba;
    u32 blocks, slot;
};

// What the host passes. `pages` holds the controller's address of each page of the pool, `list_pages` of each page of
// `lists`. Each slot has one list of `list_entries`, a power of two, so that no list crosses a page.
struct Batch {
    Queue* queues;
    const Command* commands;
    int* results;
    const u64* pages;
    u64* lists;
    const u64* list_pages;
    u64 count, slot_pages, list_entries, block_bytes, nsid, limit_ns;
};

// Shared by the threads of a block. `ids` is a stack: with n commands in flight, the identifiers from ids[n] on are free.
struct Shared {
    u32 arrived, late, strange;
    u32 ids[MOST_DEPTH];
    int commands[MOST_DEPTH];  // by identifier; -1: none is in flight
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
__device__ u32 completion(const Queue& queue, u32 head, u32 i)
{
    return ((const volatile u32*)queue.completion)[(head + i) % queue.depth * 4 + 3];
}

// Drives a block's queue until its share of the batch is over: every gridDim.x-th command. Where nothing completes for
// `limit_ns`, it gives up, and what is in flight is lost. The loops of all threads take the same turns.
__device__ void drive(const Batch& batch, Shared& shared)
{
    const Queue queue = batch.queues[blockIdx.x];
    const bool leads = threadIdx.x == 0;
    const u32 depth = queue.depth, most = depth - 1;  // a full queue would look empty
    u32 tail = queue.tail, head = queue.head, phase = queue.phase, flying = 0;
    u64 next = blockIdx.x, since = now();
    for (u32 i = threadIdx.x; i < most; i += blockDim.x) {
        shared.ids[i] = i;
        shared.commands[i] = -1;
    }
    if (leads) shared.strange = 0;
    __syncthreads();

    while (flying || next < batch.count) {
        const u64 left = next < batch.count ? (batch.count - next + gridDim.x - 1) / gridDim.x : 0;
        const u32 fresh = left < most - flying ? (u32)left : most - flying;
        for (u32 i = threadIdx.x; i < fresh; i += blockDim.x) {
            const u32 id = shared.ids[flying + i];
            const u64 number = next + (u64)i * gridDim.x;
            shared.commands[id] = (int)number;
            encode(batch, batch.commands[number], id, (volatile u32*)queue.submission + (tail + i) % depth * 16);
        }
        flying += fresh;
        next += (u64)fresh * gridDim.x;
        tail = (tail + fresh) % depth;
        if (leads) {
            shared.arrived = flying;
            shared.late = now() - since > batch.limit_ns;
        }
        __threadfence_system();
        __syncthreads();

        if (leads && fresh) ring(queue.submission_doorbell, tail);
        for (u32 i = threadIdx.x; i < flying; i += blockDim.x) {
            const u32 expected = head + i < depth ? phase : phase ^ 1;
            if ((completion(queue, head, i) >> 16 & 1) != expected) {
                atomicMin(&shared.arrived, i);
                break;
            }
        }
        __syncthreads();

        const u32 arrived = shared.arrived, late = shared.late;
        for (u32 i = threadIdx.x; i < arrived; i += blockDim.x) {
            const u32 word = completion(queue, head, i), id = word & 0xffff;
            const int number = id < most ? atomicExch(&shared.commands[id], -1) : -1;
            if (number < 0) {
                atomicExch(&shared.strange, 1u);
                continue;
            }
            batch.results[number] = (int)(word >> 16 & 0xfffe);
            shared.ids[flying - arrived + i] = id;
        }
        __threadfence_system();
        __syncthreads();

        flying -= arrived;
        if (head + arrived >= depth) phase ^= 1;
        head = (head + arrived) % depth;
        if (leads && arrived) {
            ring(queue.completion_doorbell, head);
            since = now();
        }
        if (shared.strange || (late && !arrived)) break;
        if (!arrived) rest();
    }

    for (u32 i = threadIdx.x; i < most; i += blockDim.x)
        if (shared.commands[i] >= 0) batch.results[shared.commands[i]] = shared.strange ? STRANGE : LOST;
    if (leads) {
        Queue& kept = batch.queues[blockIdx.x];
        kept.tail = tail;
        kept.head = head;
        kept.phase = phase;
    }
}

#ifdef __CUDACC__
extern "C" __global__ void read_blocks(const Batch* batch)
{
    __shared__ Shared shared;
    const Batch own = *batch;  // it lies in host memory
    drive(own, shared);
}
#endif
