/* The handler of SIGBUS that bus_error.py installs: names the record whose page could not be read, then steps aside.

Nothing here needs Python, memory or a lock: the thread that faulted may have the interpreter's lock or wait for one who
has it. The kernel's list of mappings says which file lies at the address, so mapping a record costs nothing extra.

bus_error.py holds what tools/bus_error.py makes of this file for each architecture. */

#include <signal.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/uio.h>

/* A page that may be written, 64 KiB behind the code. bus_error.py fills it. */
extern __attribute__((visibility("hidden"))) struct {
    int (*sigaction)(int, const struct sigaction *, struct sigaction *);
    struct sigaction previous; /* what was installed before */
    struct iovec said[3];      /* the message: a text, the path, a text */
    char maps[16];             /* /proc/self/maps */
    char suffix[32];           /* how records are called */
    int state;                 /* 0, 1 while a thread writes the message, 2 afterwards */
    char piece[4096], path[8192];
    struct sigaction none; /* the system's own handling */
} shared;

static long call(long number, long a, long b, long c, long d)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
#endif
}

/* Whether the path of a mapping is that of a record, which may have been deleted since. */
static int is_record(size_t length)
{
    for (size_t at = 0; at < length; at++) {
        size_t same = 0;
        while (shared.suffix[same] && at + same < length && shared.path[at + same] == shared.suffix[same])
            same++;
        if (!shared.suffix[same])
            return 1;
    }
    return 0;
}

/* Puts the path of the file that is mapped at an address into shared.path, and returns its length: 0 if there is none. */
static size_t find(unsigned long address)
{
    long fd = call(SYS_openat, -100, (long)shared.maps, 0, 0);
    long have;
    unsigned long number = 0, start = 0; /* the number that is being read; the first of the line */
    int field = 0, here = 0;             /* start, end, other words, path; whether the line is that of the address */
    size_t length = 0;
    if (fd < 0)
        return 0;
    while ((have = call(SYS_read, fd, (long)shared.piece, sizeof shared.piece, 0)) > 0) {
        for (long i = 0; i < have; i++) {
            char c = shared.piece[i];
            if (c == '\n') {
                if (here)
                    goto found;
                field = 0;
                number = 0;
            } else if (field == 0 && c == '-') {
                field = 1;
                start = number;
                number = 0;
            } else if (field == 1 && c == ' ') {
                field = 2;
                here = start <= address && address < number;
            } else if (field < 2) {
                number = number << 4 | (unsigned long)(c <= '9' ? c - '0' : c - 'a' + 10);
            } else if (here && (field == 3 || c == '/')) {
                field = 3;
                if (length < sizeof shared.path)
                    shared.path[length++] = c;
            }
        }
    }
found:
    call(SYS_close, fd, 0, 0, 0);
    return length;
}

__attribute__((section(".text.on_bus_error"), visibility("hidden"))) void on_bus_error(int number, siginfo_t *info)
{
    /* A fault, not a signal that somebody sent: it comes again when this returns, to the handler of before. */
    int fault = info->si_code >= BUS_ADRALN && info->si_code <= 4;
    int before = 0;
    __atomic_compare_exchange_n(&shared.state, &before, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    if (before == 1)
        return; /* another thread is at it, and this one faults again until it is done */
    if (before == 0 && fault) {
        size_t length = find((unsigned long)info->si_addr);
        if (is_record(length)) {
            shared.said[1].iov_len = length;
            call(SYS_writev, 2, (long)shared.said, 3, 0);
        }
    }
    if (before == 2) { /* another thread was faster, or the handler of before has put this one back */
        struct sigaction now;
        shared.sigaction(number, NULL, &now);
        if ((void *)now.sa_sigaction == (void *)on_bus_error)
            shared.sigaction(number, &shared.none, NULL);
    } else
        shared.sigaction(number, &shared.previous, NULL);
    __atomic_store_n(&shared.state, 2, __ATOMIC_RELEASE);
    if (!fault)
        call(SYS_tgkill, call(SYS_getpid, 0, 0, 0, 0), call(SYS_gettid, 0, 0, 0, 0), number, 0);
}
