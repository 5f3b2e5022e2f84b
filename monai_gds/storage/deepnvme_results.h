// Compiled in front of DeepSpeed's deepspeed_aio_common.cpp (see deepnvme_build.py).
//
// DeepSpeed submits with io_submit, reaps with io_pgetevents, and drops what the kernel says about each transfer. Here
// the same calls keep every result that is not the number of bytes asked for, by the address of the transfer's buffer,
// until monai_gds_take_error asks for it.

#pragma once
#include <libaio.h>
#include <unistd.h>
#include <cerrno>
#include <cstddef>
#include <deque>
#include <mutex>

namespace monai_gds {
// What was asked for travels with the transfer: DeepSpeed fills its iocbs anew while the kernel is still at work for
// them, so what an iocb says on completion may be about another transfer.
struct request {
    const char* buffer;
    long nbytes;
};

struct failure {
    const char* buffer;
    long result;  // negative: an errno; else how many bytes were transferred
};

static std::mutex mutex;
static std::deque<failure> failures;  // bounded: nobody may be asking

static int submit(io_context_t context, long count, iocb** iocbs)
{
    for (long i = 0; i < count; ++i) {
        const auto& asked = iocbs[i]->u.c;
        iocbs[i]->data = new request{static_cast<const char*>(asked.buf), static_cast<long>(asked.nbytes)};
    }
    // All of them: DeepSpeed waits for as many as it asked for. A kernel short of memory is given ten seconds.
    long done = 0;
    for (int patience = 10000; done < count && patience > 0;) {
        const int taken = io_submit(context, count - done, iocbs + done);
        if (taken > 0) {
            done += taken;
        } else if (taken == -EAGAIN || taken == -EINTR || taken == -ENOMEM) {
            --patience;
            usleep(1000);
        } else {
            break;
        }
    }
    return done == count ? static_cast<int>(count) : -1;
}

static int pgetevents(io_context_t context, long least, long most, io_event* events, timespec* timeout, sigset_t* mask)
{
    const int count = io_pgetevents(context, least, most, events, timeout, mask);
    for (int i = 0; i < count; ++i) {
        const auto* asked = static_cast<request*>(events[i].data);
        const auto result = static_cast<long>(events[i].res);
        if (result != asked->nbytes) {
            std::lock_guard<std::mutex> lock(mutex);
            if (failures.size() == 65536) { failures.pop_front(); }
            failures.push_back({asked->buffer, result});
        }
        delete asked;
    }
    return count;
}
}  // namespace monai_gds

// Takes the failures of transfers from or to a piece of memory. Returns 0 when there are none; else 1, and the first
// one's address and result.
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
