// Compiled in front of DeepSpeed's deepspeed_aio_common.cpp (see build.py).
//
// DeepSpeed submits with io_submit, reaps with io_pgetevents, drops the kernel's answer to each transfer, and ends the
// process when either call does less than it was asked to. Here the same calls do all of it. They keep every result
// other than the number of bytes asked for, by the address of the transfer's buffer, until monai_gds_take_error fetches
// it.

#pragma once
#include <libaio.h>
#include <unistd.h>
#include <cerrno>
#include <cstddef>
#include <deque>
#include <mutex>

namespace monai_gds {
// What was asked for travels with the transfer: DeepSpeed refills its iocbs while the kernel still works on them, so on
// completion an iocb may hold another transfer.
struct request {
    const char* buffer;
    long nbytes;
};

struct failure {
    const char* buffer;
    long result;  // negative: an errno; else how many bytes were transferred
};

static std::mutex mutex;
static std::deque<failure> failures;  // bounded: nobody may fetch them

// Transfers that the kernel refused, which never complete. One thread submits and reaps.
static thread_local long refused = 0;

static void keep(const char* buffer, long result)
{
    std::lock_guard<std::mutex> lock(mutex);
    if (failures.size() == 65536) { failures.pop_front(); }
    failures.push_back({buffer, result});
}

// Submits all of them, since DeepSpeed would end the process otherwise. A refused transfer is kept as a failure.
static int submit(io_context_t context, long count, iocb** iocbs)
{
    for (long i = 0; i < count; ++i) {
        const auto& asked = iocbs[i]->u.c;
        iocbs[i]->data = new request{static_cast<const char*>(asked.buf), static_cast<long>(asked.nbytes)};
    }
    long done = 0;
    long error = 0;
    for (int patience = 10000; done < count && patience > 0;) {  // ten seconds for a kernel short of memory
        const int taken = io_submit(context, count - done, iocbs + done);
        if (taken > 0) {
            done += taken;
            continue;
        }
        error = taken < 0 ? taken : -EAGAIN;
        if (error != -EAGAIN && error != -EINTR && error != -ENOMEM) { break; }
        --patience;
        usleep(1000);
    }
    for (; done < count; ++done) {
        const auto* asked = static_cast<request*>(iocbs[done]->data);
        keep(asked->buffer, error);
        ++refused;
        delete asked;
    }
    return static_cast<int>(count);
}

// Waits for all of them, since DeepSpeed would end the process otherwise. The kernel returns early when a signal arrives
// and when the process is stopped and continued.
static int pgetevents(io_context_t context, long least, long most, io_event* events, timespec* timeout, sigset_t* mask)
{
    long count = 0;
    const long without = refused;
    refused = 0;
    while (count + without < least) {
        const long room = most - without - count;
        const int more = io_pgetevents(context, least - without - count, room, events + count, timeout, mask);
        if (more == -EINTR) { continue; }
        if (more < 0) { return more; }
        count += more;
    }
    for (long i = 0; i < count; ++i) {
        const auto* asked = static_cast<request*>(events[i].data);
        const auto result = static_cast<long>(events[i].res);
        if (result != asked->nbytes) { keep(asked->buffer, result); }
        delete asked;
    }
    return static_cast<int>(count + without);
}
}  // namespace monai_gds

// Takes the failures of transfers from or to a piece of memory. Returns 0 if there are none, else 1 with the address and
// the result of the first.
extern "C" __attribute__((visibility("default"))) int monai_gds_take_error(const char* memory,
                                                                           size_t nbytes,
                                                                           const char** buffer,
                                                                           long* result)
{
    std::lock_guard<std::mutex> lock(monai_gds::mutex);
    int found = 0;
    for (auto failure = monai_gds::failures.begin(); failure != monai_gds::failures.end();) {
        if (failure->buffer < memory || failure->buffer >= memory + nbytes) {
            ++failure;
            continue;
        }
        if (!found) {
            *buffer = failure->buffer;
            *result = failure->result;
            found = 1;
        }
        failure = monai_gds::failures.erase(failure);
    }
    return found;
}

#define io_submit monai_gds::submit
#define io_pgetevents monai_gds::pgetevents
