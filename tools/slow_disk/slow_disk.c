/* A folder, mounted again by FUSE (linux/fuse.h), on which every open takes a given time. For __init__.py.
 *
 *     slow_disk FOLDER MOUNT_POINT COUNTS
 *
 * COUNTS is a file of struct counts, which this process and its user map: the delay may be changed while mounted, and
 * what was counted is read there. Each of the threads answers one request after another, and sleeps in an open. What
 * is not needed for reading, and for writing whole files, is refused with ENOSYS.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define THREADS 256
#define WRITE_BYTES (128 << 10)
#define NODES (1 << 20)

struct counts {
    _Atomic uint64_t delay_ns, opens, in_flight, most_in_flight, waited_ns, asked;
};

static struct counts *counts;
static int device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *names[NODES]; /* the path of each node; they are never forgotten */
static uint64_t nodes = FUSE_ROOT_ID;

static const char *path_of(uint64_t node) { return node <= nodes ? names[node] : ""; }

/* Where the number of a path is kept. With the lock. */
static uint64_t *number_of(const char *path) {
    static char *known[NODES];
    static uint64_t number[NODES];
    uint64_t at = 14695981039346656037u;
    for (const char *c = path; *c; c++) at = (at ^ (unsigned char)*c) * 1099511628211u;
    for (at %= NODES; known[at] && strcmp(known[at], path); at = (at + 1) % NODES);
    if (!known[at]) known[at] = strdup(path);
    return &number[at];
}

static uint64_t new_node(char *path) {
    if (nodes + 2 >= NODES / 2) abort();
    names[++nodes] = path;
    return nodes;
}

static uint64_t node_of(const char *path) {
    pthread_mutex_lock(&lock);
    uint64_t *number = number_of(path), found = *number ? *number : (*number = new_node(strdup(path)));
    pthread_mutex_unlock(&lock);
    return found;
}

/* Moves a file: the kernel goes on calling it by its number. */
static int move(const char *from, const char *to) {
    if (rename(from, to)) return errno;
    pthread_mutex_lock(&lock);
    uint64_t *old = number_of(from), *new = number_of(to);
    if (*old) names[*new = *old] = strdup(to);
    *old = 0;
    pthread_mutex_unlock(&lock);
    return 0;
}

static void answer(uint64_t unique, int error, const void *data, size_t nbytes) {
    struct fuse_out_header head = {.len = sizeof head + (error ? 0 : nbytes), .error = -error, .unique = unique};
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)data, nbytes}};
    ssize_t ignored = writev(device, parts, error || !nbytes ? 1 : 2);
    (void)ignored; /* the request was interrupted */
}

static void fill(struct fuse_attr *to, const struct stat *from) {
    *to = (struct fuse_attr){
        .ino = from->st_ino, .size = from->st_size, .blocks = from->st_blocks, .atime = from->st_atim.tv_sec,
        .mtime = from->st_mtim.tv_sec, .ctime = from->st_ctim.tv_sec, .atimensec = from->st_atim.tv_nsec,
        .mtimensec = from->st_mtim.tv_nsec, .ctimensec = from->st_ctim.tv_nsec, .mode = from->st_mode,
        .nlink = from->st_nlink, .uid = from->st_uid, .gid = from->st_gid, .blksize = 4096,
    };
}

static int entry(const char *path, struct fuse_entry_out *out) {
    struct stat st;
    if (lstat(path, &st)) return errno;
    *out = (struct fuse_entry_out){.nodeid = node_of(path), .entry_valid = 3600, .attr_valid = 3600};
    fill(&out->attr, &st);
    return 0;
}

static void delayed(void) {
    uint64_t now = atomic_fetch_add(&counts->in_flight, 1) + 1, most = counts->most_in_flight;
    while (now > most && !atomic_compare_exchange_weak(&counts->most_in_flight, &most, now));
    uint64_t delay = counts->delay_ns;
    struct timespec left = {delay / 1000000000, delay % 1000000000};
    while (delay && nanosleep(&left, &left) && errno == EINTR);
    counts->opens++;
    counts->waited_ns += delay;
    counts->in_flight--;
}

static void list(uint64_t unique, const struct fuse_read_in *in, char *room) {
    DIR *folder = (DIR *)(uintptr_t)in->fh;
    size_t used = 0;
    pthread_mutex_lock(&lock);
    seekdir(folder, in->offset);
    for (struct dirent *found; (found = readdir(folder));) {
        size_t length = strlen(found->d_name), size = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
        if (used + size > in->size) break;
        struct fuse_dirent *one = (struct fuse_dirent *)(room + used);
        memset(one, 0, size);
        one->ino = found->d_ino, one->off = telldir(folder), one->namelen = length, one->type = found->d_type;
        memcpy(one->name, found->d_name, length);
        used += size;
    }
    pthread_mutex_unlock(&lock);
    answer(unique, 0, room, used);
}

static int set_attributes(const char *path, const struct fuse_setattr_in *in) {
    struct timespec times[2] = {
        {in->atime, in->valid & FATTR_ATIME_NOW ? UTIME_NOW : in->valid & FATTR_ATIME ? in->atimensec : UTIME_OMIT},
        {in->mtime, in->valid & FATTR_MTIME_NOW ? UTIME_NOW : in->valid & FATTR_MTIME ? in->mtimensec : UTIME_OMIT},
    };
    if (in->valid & FATTR_SIZE && truncate(path, in->size)) return errno;
    if (in->valid & FATTR_MODE && chmod(path, in->mode)) return errno;
    if (in->valid & (FATTR_UID | FATTR_GID) &&
        lchown(path, in->valid & FATTR_UID ? in->uid : (uid_t)-1, in->valid & FATTR_GID ? in->gid : (gid_t)-1))
        return errno;
    return utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW) ? errno : 0;
}

/* Answers a request about names: node and name, or two of them. Returns whether it was one. */
static int about_names(const struct fuse_in_header *head, char *in, char *room) {
    char path[4096], other[4096];
    size_t skip = head->opcode == FUSE_MKDIR ? sizeof(struct fuse_mkdir_in)
                  : head->opcode == FUSE_CREATE ? sizeof(struct fuse_create_in)
                  : head->opcode == FUSE_RENAME2 ? sizeof(struct fuse_rename2_in)
                  : head->opcode == FUSE_RENAME || head->opcode == FUSE_LINK ? 8 : 0;
    struct fuse_entry_out *out = (struct fuse_entry_out *)room;
    int error = 0;
    snprintf(path, sizeof path, "%s/%s", path_of(head->nodeid), in + skip);
    switch (head->opcode) {
    case FUSE_LOOKUP: break;
    case FUSE_MKDIR: error = mkdir(path, ((struct fuse_mkdir_in *)in)->mode) ? errno : 0; break;
    case FUSE_LINK: error = link(path_of(((struct fuse_link_in *)in)->oldnodeid), path) ? errno : 0; break;
    case FUSE_UNLINK: answer(head->unique, unlink(path) ? errno : 0, NULL, 0); return 1;
    case FUSE_RMDIR: answer(head->unique, rmdir(path) ? errno : 0, NULL, 0); return 1;
    case FUSE_RENAME:
    case FUSE_RENAME2:
        snprintf(other, sizeof other, "%s/%s", path_of(*(uint64_t *)in), in + skip + strlen(in + skip) + 1);
        answer(head->unique, move(path, other), NULL, 0);
        return 1;
    case FUSE_CREATE: {
        const struct fuse_create_in *create = (struct fuse_create_in *)in;
        int fd = open(path, (create->flags & ~O_NOFOLLOW) | O_CREAT, create->mode);
        error = fd < 0 ? errno : entry(path, out);
        *(struct fuse_open_out *)(out + 1) = (struct fuse_open_out){.fh = fd};
        answer(head->unique, error, room, sizeof *out + sizeof(struct fuse_open_out));
        return 1;
    }
    default: return 0;
    }
    error = error ? error : entry(path, out);
    answer(head->unique, error, room, sizeof *out);
    return 1;
}

static void handle(const struct fuse_in_header *head, char *in, char *room) {
    uint64_t unique = head->unique;
    const char *path = path_of(head->nodeid);
    struct stat st;
    if (about_names(head, in, room)) return;
    switch (head->opcode) {
    case FUSE_INIT: {
        struct fuse_init_in *init = (struct fuse_init_in *)in;
        struct fuse_init_out out = {
            .major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION, .max_readahead = init->max_readahead,
            .flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_PARALLEL_DIROPS, .max_background = THREADS,
            .congestion_threshold = THREADS, .max_write = WRITE_BYTES, .time_gran = 1,
        };
        answer(unique, 0, &out, sizeof out);
        break;
    }
    case FUSE_GETATTR:
    case FUSE_SETATTR: {
        struct fuse_attr_out out = {.attr_valid = 3600};
        counts->asked++;
        int error = head->opcode == FUSE_SETATTR ? set_attributes(path, (struct fuse_setattr_in *)in) : 0;
        if (!error && lstat(path, &st)) error = errno;
        if (!error) fill(&out.attr, &st);
        answer(unique, error, &out, sizeof out);
        break;
    }
    case FUSE_OPEN: {
        int fd = open(path, ((struct fuse_open_in *)in)->flags & ~(O_NONBLOCK | O_CREAT | O_DIRECT));
        int error = fd < 0 ? errno : 0;
        struct fuse_open_out out = {.fh = fd};
        delayed();
        answer(unique, error, &out, sizeof out);
        break;
    }
    case FUSE_OPENDIR: {
        DIR *folder = opendir(path);
        struct fuse_open_out out = {.fh = (uintptr_t)folder};
        answer(unique, folder ? 0 : errno, &out, sizeof out);
        break;
    }
    case FUSE_READDIR: list(unique, (struct fuse_read_in *)in, room); break;
    case FUSE_READ: {
        struct fuse_read_in *wanted = (struct fuse_read_in *)in;
        ssize_t got = pread(wanted->fh, room, wanted->size, wanted->offset);
        answer(unique, got < 0 ? errno : 0, room, got < 0 ? 0 : got);
        break;
    }
    case FUSE_WRITE: {
        struct fuse_write_in *given = (struct fuse_write_in *)in;
        ssize_t put = pwrite(given->fh, given + 1, given->size, given->offset);
        struct fuse_write_out out = {.size = put < 0 ? 0 : put};
        answer(unique, put < 0 ? errno : 0, &out, sizeof out);
        break;
    }
    case FUSE_RELEASE: close(((struct fuse_release_in *)in)->fh); answer(unique, 0, NULL, 0); break;
    case FUSE_RELEASEDIR: closedir((DIR *)(uintptr_t)((struct fuse_release_in *)in)->fh); answer(unique, 0, NULL, 0); break;
    case FUSE_STATFS: {
        struct fuse_statfs_out out = {.st = {.blocks = 1 << 28, .bfree = 1 << 27, .bavail = 1 << 27, .files = 1 << 20,
                                             .ffree = 1 << 20, .bsize = 4096, .namelen = 255, .frsize = 4096}};
        answer(unique, 0, &out, sizeof out);
        break;
    }
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT: break; /* have no answer */
    default: answer(unique, ENOSYS, NULL, 0);
    }
}

static void *serve(void *unused) {
    size_t room = WRITE_BYTES + (64 << 10);
    char *request = malloc(room), *reply = malloc(1 << 20);
    for (;;) {
        ssize_t got = read(device, request, room);
        if (got < 0 && errno == ENODEV) exit(0); /* it was unmounted */
        if (got >= (ssize_t)sizeof(struct fuse_in_header))
            handle((struct fuse_in_header *)request, request + sizeof(struct fuse_in_header), reply);
    }
    return unused;
}

static const char *mount_point;

static void leave(int unused) {
    (void)unused;
    umount2(mount_point, MNT_DETACH);
    _exit(0);
}

int main(int argc, char **argv) {
    char options[200];
    int file = argc == 4 ? open(argv[3], O_RDWR) : -1;
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || counts == MAP_FAILED) return perror("COUNTS"), 2;
    names[FUSE_ROOT_ID] = realpath(argv[1], NULL);
    mount_point = argv[2];
    signal(SIGTERM, leave);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* also if its user is killed */
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,max_read=%d", device, 1 << 20);
    if (device < 0 || mount("slow", argv[2], "fuse.slow", MS_NOSUID | MS_NODEV, options)) return perror("mount"), 1;
    pthread_t thread;
    for (int i = 1; i < THREADS; i++)
        if (pthread_create(&thread, NULL, serve, NULL)) return perror("pthread_create"), 1;
    serve(NULL);
}
